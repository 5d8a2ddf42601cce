"""A Gemma decoder layer of one stream, cut where streams meet: projections before attention, output and MLP after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from .attention import split_heads
from .norms import AdaRMSNorm, RMSNorm
from .precision import Linear
from .presets import CLOSED
from .rope import rotate, rotation

if TYPE_CHECKING:
    from torch import Tensor

INIT_STD = 0.02


@dataclass(config=CLOSED, frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """Sizes of a Gemma stream. Streams that attend to one another share depth, heads, kv_heads and head_dim."""

    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    mlp: PositiveInt


class GatedMlp(nn.Module):
    """down(gelu(gate(x)) * up(x)), with the tanh form of gelu."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden, bias=False)
        self.up = Linear(width, hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class GemmaLayer(nn.Module):
    """One stream's layer. `adaptive` replaces both norms by adaRMS, and then every call needs a condition.

    It has no `forward`: attention lies between its halves, and which keys are attended is the business of the unit that
    holds it. Its parameters live in submodules that are called, so sharding hooks fire.
    """

    def __init__(self, config: GemmaConfig, *, adaptive: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        norm = AdaRMSNorm if adaptive else RMSNorm
        self.attention_norm = norm(config.width)
        self.query = Linear(config.width, config.heads * config.head_dim, bias=False)
        self.key = Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.value = Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.output = Linear(config.heads * config.head_dim, config.width, bias=False)
        self.mlp_norm = norm(config.width)
        self.mlp = GatedMlp(config.width, config.mlp)
        for linear in (self.query, self.key, self.value, self.output, self.mlp.gate, self.mlp.up, self.mlp.down):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def before(self, x: Tensor, positions: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query (B, H, L, D), key and value (B, G, L, D) of `x` (B, L, W), and the gate of what attention will answer."""
        normed, gate = _norm(self.attention_norm, x, condition)
        cos, sin = rotation(positions, self.head_dim)
        query = rotate(split_heads(self.query(normed), self.heads), cos, sin)
        key = rotate(split_heads(self.key(normed), self.kv_heads), cos, sin)
        return query, key, split_heads(self.value(normed), self.kv_heads), gate

    def after(self, x: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None) -> Tensor:
        """The layer's answer (B, L, W), given its input and what attention answered (B, L, H * D)."""
        x = _residual(x, self.output(attended), gate)
        normed, gate = _norm(self.mlp_norm, x, condition)
        return _residual(x, self.mlp(normed), gate)


def _norm(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (norm(x), None) if condition is None else norm(x, condition)


def _residual(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return x + branch if gate is None else x + gate * branch
