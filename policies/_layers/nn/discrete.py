"""Discrete actions: FAST tokens with an embedding and a head of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from .decoder import INIT_STD
from .precision import Linear

if TYPE_CHECKING:
    from torch import Tensor


class DiscreteActions(nn.Module):
    """Both directions between FAST token ids and the backbone's hidden states. The last id is padding."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        # Unscaled and of unit size: what text embeddings are after their sqrt(width).
        self.embedding = nn.Embedding(tokens, width)
        self.head = Linear(width, tokens, bias=False)
        nn.init.normal_(self.head.weight, std=INIT_STD)

    def forward(self, x: Tensor, *, scores: bool = False) -> Tensor:
        """Embed token ids (B, F), or with `scores` turn hidden states (B, F, W) into float32 logits (B, F, V)."""
        return self.head(x).float() if scores else self.embedding(x)
