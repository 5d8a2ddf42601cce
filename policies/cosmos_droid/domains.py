"""Layers with weights for every domain, an embodiment with its action space."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from .._layers.nn.precision import to_weight

if TYPE_CHECKING:
    from torch import Tensor


class DomainLinear(nn.Module):
    """A linear layer with a weight and a bias of its own in every domain.

    Both are rows of tables, which every call looks up: sharding hooks fire, and the tables are in the graph of every step. Rows
    of domains that do not occur have a gradient of 0.
    """

    def __init__(self, in_features: int, out_features: int, domains: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Embedding(domains, in_features * out_features)  # rows are (in, out) matrices
        self.bias = nn.Embedding(domains, out_features)
        nn.init.normal_(self.weight.weight, std=in_features**-0.5)
        nn.init.zeros_(self.bias.weight)

    def forward(self, x: Tensor, domain: int) -> Tensor:
        """Apply the layer of a domain to (..., in_features).

        All samples have one domain: gradients of a table that is looked up for each sample would be added up in the dtype of
        the table.
        """
        index = torch.full((), domain, device=x.device)
        weight = self.weight(index).view(self.in_features, self.out_features)
        return F.linear(to_weight(x, weight), weight.T, self.bias(index))
