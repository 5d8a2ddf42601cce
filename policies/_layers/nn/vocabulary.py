"""Text embedding tied with the output head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from .decoder import INIT_STD
from .precision import to_weight

if TYPE_CHECKING:
    from torch import Tensor


class Vocabulary(nn.Embedding):
    """Text embedding whose weight is also the output head. Embeddings are multiplied by sqrt(width), as in Gemma."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(tokens, width)
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, x: Tensor, *, logits: bool = False) -> Tensor:
        """Embed token ids (B, L), or with `logits` map hidden states (B, L, W) to float32 logits (B, L, V).

        Both directions go through `forward`, because ZeRO-3 gathers the weight when the module is called. Under FSDP the weight
        belongs to the root unit, which stays gathered from the start of forward to the end of backward.
        """
        if logits:
            return F.linear(to_weight(x, self.weight), self.weight).float()
        return super().forward(x) * self.embedding_dim**0.5
