"""Discrete actions: FAST tokens (arXiv:2501.09747) with an embedding and a head of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
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

    def forward(self, x: Tensor, *, targets: Tensor | None = None) -> Tensor:
        """Embed token ids (B, F), or return cross-entropies (B, F) float32 of `targets` (B, F) from hidden states (B, F, W).

        The vocabulary is so small that recomputing logits would cost more than it saves.
        """
        if targets is None:
            return self.embedding(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
