"""The table of text tokens, tied: it embeds, and it scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from .decoder import INIT_STD
from .precision import to_weight

if TYPE_CHECKING:
    from torch import Tensor


class Vocabulary(nn.Embedding):
    """One parameter for both directions, registered once. Embeddings are multiplied by sqrt(width), as Gemma does."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(tokens, width)
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, x: Tensor, *, scores: bool = False) -> Tensor:
        """Embed token ids (B, L), or with `scores` turn hidden states (B, L, W) into float32 logits (B, L, V).

        Both directions go through the call, because that is where ZeRO-3 gathers the table; FSDP leaves it to the root unit,
        which stays gathered from the start of forward to the end of backward.
        """
        if scores:
            return F.linear(to_weight(x, self.weight), self.weight).float()
        return super().forward(x) * self.embedding_dim**0.5
