"""A module as others write it: numpy, dropout, batch norm, buffers of all kinds, a transposed layer and an unused one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import benchbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.registry.contracts import Axes, Policy

TOKENS, LENGTH = 64, 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.dropout(self.attention(h, h, h, need_weights=False)[0])
        return x + scale * self.mlp(x)


class Speller(nn.Module):
    positions: Tensor
    indices: Tensor
    rotations: Tensor

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        angles = np.arange(LENGTH)[:, None] / np.power(10000, np.arange(width)[None] / width)
        self.register_buffer("positions", torch.from_numpy(np.sin(angles)).float(), persistent=False)
        self.register_buffer("indices", torch.arange(LENGTH))
        self.register_buffer("scale", torch.tensor(0.3))
        turns = torch.arange(LENGTH)[:, None] * 0.1 ** torch.arange(width // 2)
        self.register_buffer("rotations", torch.polar(torch.ones_like(turns), turns), persistent=False)
        self.module = nn.Linear(width, width)  # a name that wrappers give to what they wrap
        self.module.weight = nn.Parameter(torch.empty(width, width).normal_(std=0.1).t())
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.unused = nn.Linear(3, 3)
        self.lm_head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.module(self.embedding(tokens) + self.positions[self.indices])
        x = torch.view_as_real(torch.view_as_complex(x.float().unflatten(2, (-1, 2))) * self.rotations).flatten(2).to(x.dtype)
        for layer in self.layers:
            x = layer(x, scale=self.scale)
        return self.lm_head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class ReadsItsWeights(Speller):
    """Its constructor reads a value, which the meta device does not have."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.largest = float(self.lm_head.weight.max())


class KeepsATable(Speller):
    """It keeps a tensor that is neither a parameter nor a buffer, as schedulers of diffusion models do."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.tables = {"steps": [torch.linspace(0, 1, 4)]}


def tokens(size: int, seed: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(TOKENS, (size, LENGTH), generator=torch.Generator().manual_seed(seed))}


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), batch["tokens"][:, 1:], reduction="none")
    return losses.mean(dim=1)


CLASSES = {"speller": Speller, "reads": ReadsItsWeights, "table": KeepsATable}


def build(preset: Mapping[str, Any], axes: Axes) -> Policy:
    return benchbox.adapt(CLASSES[preset["kind"]](preset["width"], preset["depth"]), loss=loss, batch=tokens)
