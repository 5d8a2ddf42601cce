"""Discrete actions: FAST tokens (arXiv:2501.09747) with an embedding and a head of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from .decoder import INIT_STD
from .precision import Linear

if TYPE_CHECKING:
    from torch import Tensor


class DiscreteActions(nn.Module):
    """Embedding and head of FAST tokens. The last token id is padding."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        # Unscaled: its standard deviation of 1 is that of text embeddings after their factor sqrt(width).
        self.embedding = nn.Embedding(tokens, width)
        self.head = Linear(width, tokens)
        nn.init.normal_(self.head.weight, std=INIT_STD)

    def forward(self, x: Tensor, *, logits: bool = False) -> Tensor:
        """Embed token ids (B, F), or with `logits` map hidden states (B, F, W) to float32 logits (B, F, V)."""
        return self.head(x).float() if logits else self.embedding(x)
