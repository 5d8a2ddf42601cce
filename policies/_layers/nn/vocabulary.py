"""Text embedding tied with the output head, and a head of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from .cross_entropy import head_cross_entropy
from .decoder import INIT_STD
from .precision import Linear

if TYPE_CHECKING:
    from torch import Tensor


class Vocabulary(nn.Embedding):
    """Text embedding whose weight is also the output head. Embeddings are multiplied by sqrt(width), as in Gemma."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(tokens, width)
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, x: Tensor, *, targets: Tensor | None = None, predict: bool = False) -> Tensor:
        """Embed token ids (B, L), or from hidden states (B, L, W) compute what the head says about the tokens.

        With `targets` (B, L) these are their cross-entropies (B, L) float32, with `predict` the most likely ids (B, L).

        Both directions go through `forward`, because ZeRO-3 gathers the weight when the module is called. Under FSDP the weight
        belongs to the root unit, which stays gathered from the start of forward to the end of backward.
        """
        if targets is not None:
            return head_cross_entropy(x, self.weight, targets)
        if predict:
            return F.linear(x, self.weight).argmax(dim=-1)
        return super().forward(x) * self.embedding_dim**0.5


class VocabularyHead(Linear):
    """Output head that is not tied with the text embedding, called with targets alone. It has no bias."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__(width, tokens, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """Return the cross-entropies (B, L) float32 of `targets` (B, L) from hidden states (B, L, W)."""
        return head_cross_entropy(x, self.weight, targets)
