"""Casting at the edges of modules, so that one policy runs in float32, under autocast and in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


def to_weight(x: Tensor, weight: Tensor) -> Tensor:
    """`x` in the dtype of `weight`; untouched under autocast, which chooses the dtype of the product itself."""
    chosen = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)  # meta has no autocast to ask for
    return x if chosen else x.to(weight.dtype)


class Linear(nn.Linear):
    """Takes any floating dtype and computes in that of its weight, or in autocast's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(to_weight(x, self.weight))


class LayerNorm(nn.LayerNorm):
    """Computed in float32; answers in the dtype it was given."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)
