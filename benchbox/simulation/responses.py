"""Responses that a policy generates while it acts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchbox.data.dataset.lerobot import RESPONSE
from benchbox.data.text.prompt import encode_target_end
from benchbox.data.text.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchbox.registry.contracts import Batch
    from benchbox.simulation.live import LiveInputs


class Responses:
    """Ends and texts of the responses that a policy generates.

    Raises:
        ConfigurationError: the tokenizer does not fit the policy's text vocabulary.
        DataError: the tokenizer is missing or damaged.
    """

    def __init__(self, inputs: LiveInputs) -> None:
        self._tokenizer = open_tokenizer(inputs.tokenizer, inputs.spec.text_vocab)
        self._end = encode_target_end(self._tokenizer, inputs.spec.response_template)
        self._in_data = inputs.spec.response_tokens > 0 and inputs.dataset.has_text(RESPONSE)
        self._can_generate = inputs.spec.response_generated

    @property
    def end(self) -> Tensor:
        """The tokens (E,) int64 that follow the text of a response."""
        return torch.tensor(self._end, dtype=torch.int64)

    @property
    def are_generated(self) -> bool:
        """True if the policy acts on responses of its own: it was trained to write them, on data that have some."""
        return self._in_data and self._can_generate and bool(self._end)

    @property
    def warning(self) -> str | None:
        """A line on a policy that was trained on data with responses and acts without one, with the reason."""
        if not self._in_data or self.are_generated:
            return None
        reason = "it reads them and writes none"
        if self._can_generate:
            reason = "its tokenizer has no token that ends a text, so that a response of its own would not end"
        return f"the policy was trained on data with responses, and acts without one: {reason}"

    def texts(self, batch: Batch) -> list[str]:
        """Return the text of every response in a batch."""
        rows = zip(batch["response_tokens"].tolist(), batch["response_mask"].tolist(), strict=True)
        return [self._text([token for token, valid in zip(*row, strict=True) if valid]) for row in rows]

    def _text(self, tokens: Sequence[int]) -> str:
        written = tokens[: tokens.index(self._end[0])] if self._end[0] in tokens else tokens
        return self._tokenizer.decode(written)
