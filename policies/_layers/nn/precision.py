"""Modules that cast their inputs, so that one policy runs in float32, under autocast and in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


def to_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Cast `x` to the dtype of `weight`, except under autocast, which chooses the dtype of the product itself."""
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)  # torch raises for meta
    return x if autocast else x.to(weight.dtype)


class Linear(nn.Linear):
    """Linear layer for inputs of any floating dtype, computed in the dtype of its weight or of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(to_weight(x, self.weight))


class LayerNorm(nn.LayerNorm):
    """Layer norm, computed in float32, with the result in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)
