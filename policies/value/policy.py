"""A value function: the return, which measures the steps left in an episode, as a distribution over bins.

As OpenTau's value function, except for what follows; the figure is a relative change at a tiny size with random weights
(`tests/parity/test_opentau.py`).

- A response is learned wherever there is one. OpenTau learns it only from samples without actions (question answering), which
  no LeRobot dataset has. The value of such samples is not scored, as in OpenTau.
- The embeddings of a response are scaled once, like those of any text. OpenTau multiplies them by sqrt(640) once more, which
  changes the cross-entropy of the response by 0.6%.
- What pi06 says about quantiles, `<bos>`, dropout and losses holds here too. Positions are not divided in this Gemma 3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from .._layers.cost.flops import TokenCount, concat_counts, count_language, is_trainable
from .._layers.families.losses import combine_losses, text_losses
from .._layers.families.prefix_policy import PrefixConfig, PrefixPolicy
from .._layers.families.vision_language import VisionLanguage
from .._layers.nn.precision import Linear
from .._layers.nn.vocabulary import VocabularyHead
from .._layers.presets import FORBID_EXTRA, builder
from .._layers.sequence.token_sequence import Block, concat_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, BatchSpec

    from .._layers.cost.flops import FlopTally

BIN_TOLERANCE = 1e-4  # of a bin


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class ValueConfig(PrefixConfig):
    """Configuration of the value function: the model, the sizes of its inputs, and the bins of the value."""

    bins: PositiveInt


class Value(PrefixPolicy):
    """Images and prompt, which contains the state, attend to one another; a learned token after them is classified into bins.

    The response after that token is causal, and has a head of its own. No layer has a sliding window.
    """

    predicted: ClassVar[tuple[str, ...]] = ("response",)
    config: ValueConfig

    def __init__(self, config: ValueConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.model = VisionLanguage(config.model, axes)
        self.token = nn.Embedding(1, config.model.backbone.width)
        self.head = Linear(config.model.backbone.width, config.bins)
        width, tokens = config.model.backbone.width, config.model.vocabulary
        self.response_head = VocabularyHead(width, tokens) if config.response_tokens else None

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:  # noqa: ARG002
        zeros = torch.zeros_like(batch["dataset_index"])[:, None]
        value = Block(name="value", hidden=self.token(zeros), valid=zeros == 0, attention="causal")
        images = self.model.images("images", batch["images"], batch["image_mask"])
        response = [self.text("response", batch, "causal")] if self.response_head is not None else []
        return [images, self.text("prompt", batch, "continue"), value, *response]

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        """Return the cross-entropies of the return's bin and of the response.

        Also reported are the mean distance of the expected value from the return (`l1`) and the share of samples whose most
        likely bin is the correct one (`accuracy`). A sample without any action has no return.
        """
        if act:
            return self.select_actions(batch)
        batch, present = self.prepare_batch(batch)
        sequence = concat_blocks(self.blocks(batch, present))
        hidden = self.model(sequence)
        log_probabilities = self.log_probabilities(hidden[:, sequence.spans["value"].start])
        target = self.bin_indices(batch["returns"])
        has_return = (~batch["action_is_pad"]).any(dim=1).float()
        loss = F.nll_loss(log_probabilities, target, reduction="none")
        terms = {"value": (loss * has_return, has_return)}
        terms |= text_losses(sequence, self.predicted_texts, partial(self.token_losses, sequence=sequence, hidden=hidden))
        losses = combine_losses(terms, per_sample=per_sample)
        assert losses.counts is not None
        with torch.no_grad():
            distance = (self.expected_value(log_probabilities) - batch["returns"]).abs()
            correct = (log_probabilities.argmax(dim=-1) == target).float()
            for name, values in (("l1", distance), ("accuracy", correct)):
                losses.parts[name] = (values * has_return).sum() / has_return.sum().clamp(min=1.0)
                losses.counts[name] = has_return.sum()
        return losses

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return the log-probability of each bin, (B, bins) float32, from the hidden state (B, W) of the value token."""
        return self.head(self.model.norm(hidden)).float().log_softmax(dim=-1)

    def token_head(self, name: str) -> nn.Module:  # noqa: ARG002
        assert self.response_head is not None
        return self.response_head

    def bin_indices(self, returns: Tensor) -> Tensor:
        """Map returns (B,) in [-1, 0] to bins (B,) int64: (return + 1) (bins - 1), rounded down.

        Only a return of 0 is in the last bin. A return is a ratio of two whole numbers in float32, whose rounding error must
        not move it to the bin below.
        """
        return ((returns.clamp(-1, 0) + 1) * (self.config.bins - 1) + BIN_TOLERANCE).floor().long()

    def expected_value(self, log_probabilities: Tensor) -> Tensor:
        """Return the mean (B,) of distributions with log-probabilities (B, bins), as if the bins divided [-1, 0] equally."""
        bins = self.config.bins
        centres = (torch.arange(bins, device=log_probabilities.device) + 0.5) / bins - 1
        return (log_probabilities.exp() * centres).sum(dim=-1)

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        return super().count_blocks(tally, batch, present) | {"value": TokenCount(1, is_trainable(self.token))}

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        hidden = count_language(tally, self.model, concat_counts(blocks))
        input_requires_grad = hidden.requires_grad or is_trainable(self.model.norm)
        tally.count_linear(self.head, 1, input_requires_grad)
        if self.response_head is not None:
            tally.count_linear(self.response_head, blocks["response"].number, input_requires_grad, recomputed=True)

    def batch_spec(self) -> BatchSpec:
        return replace(
            super().batch_spec(),
            returns=True,
            state_in_prompt=True,
            lowest_bin=0,
            prompt_template="Task: {task}<eos>State: {state}<eos>",
            response_template="{text}",
        )


build = builder(Value, ValueConfig)
