"""A decoder layer in two halves, so that two sequences can attend jointly: projections, then output and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from ..presets import FORBID_EXTRA
from .attention import split_heads
from .norms import AdaRMSNorm, RMSNorm
from .precision import Linear
from .rope import apply_rotary, rotary_cos_sin

if TYPE_CHECKING:
    from torch import Tensor

INIT_STD = 0.02


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Configuration of decoder layers. The defaults are those of the first Gemma.

    Sequences that attend jointly share depth, heads, kv_heads and head_dim.
    """

    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    mlp: PositiveInt
    activation: Literal["gelu", "silu"] = "gelu"
    unit_norm: bool = True  # norms multiply by (1 + weight); if False by the weight, as in Qwen
    sandwich: bool = False  # also a norm after attention and after the MLP: Gemma 2 and 3
    qk_norm: bool = False  # norms of queries and keys, per head: Gemma 3, Qwen 3
    softcap: PositiveFloat | None = None  # of attention scores: Gemma 2
    rope_base: PositiveFloat = 10_000.0
    window: PositiveInt | None = None  # sliding window of local layers, in positions; None for none
    global_every: PositiveInt = 1  # every n-th layer is global, the others are local: 2 in Gemma 2, 6 in Gemma 3
    global_rope_base: PositiveFloat | None = None  # of global layers, where it differs
    global_rope_stretch: PositiveFloat = 1.0  # positions of global layers are divided by it

    def is_global(self, layer: int) -> bool:
        """Return whether the layer, counted from 0, is global: it has no window, and the RoPE of global layers."""
        return (layer + 1) % self.global_every == 0

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer, None for global layers."""
        return [None if self.is_global(layer) else self.window for layer in range(self.depth)]


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), with the tanh form of gelu."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = Linear(config.width, config.mlp, bias=False)
        self.up = Linear(config.width, config.mlp, bias=False)
        self.down = Linear(config.mlp, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down(gate * self.up(x))


class DecoderLayer(nn.Module):
    """A decoder layer of one sequence. `adaptive` makes the norms before attention and MLP adaRMS, which need a condition.

    It has no `forward`: attention runs between its two halves, in the unit that contains the layer and knows which keys to
    attend to. Its parameters are in submodules that are called, so sharding hooks fire.
    """

    def __init__(self, config: DecoderConfig, layer: int, *, adaptive: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.softcap = config.softcap
        self.rope_base, self.rope_stretch = config.rope_base, 1.0
        if config.is_global(layer):
            self.rope_base, self.rope_stretch = config.global_rope_base or config.rope_base, config.global_rope_stretch

        def norm(width: int) -> nn.Module:
            return RMSNorm(width, unit=config.unit_norm)

        self.attention_norm = AdaRMSNorm(config.width) if adaptive else norm(config.width)
        self.query = Linear(config.width, config.heads * config.head_dim, bias=False)
        self.key = Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.value = Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.query_norm = norm(config.head_dim) if config.qk_norm else None
        self.key_norm = norm(config.head_dim) if config.qk_norm else None
        self.output = Linear(config.heads * config.head_dim, config.width, bias=False)
        self.output_norm = norm(config.width) if config.sandwich else None
        self.mlp_norm = AdaRMSNorm(config.width) if adaptive else norm(config.width)
        self.mlp = GatedMlp(config)
        self.down_norm = norm(config.width) if config.sandwich else None
        for linear in (self.query, self.key, self.value, self.output, self.mlp.gate, self.mlp.up, self.mlp.down):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def project_qkv(
        self, x: Tensor, positions: Tensor, condition: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return query (B, H, L, D), key and value (B, G, L, D) of `x` (B, L, W), and the residual gate of attention."""
        normed, gate = _norm(self.attention_norm, x, condition)
        cos_sin = self._cos_sin(positions)
        query = apply_rotary(_optional(self.query_norm, split_heads(self.query(normed), self.heads)), *cos_sin)
        return query, *self._key_value(normed, cos_sin), gate

    def project_key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value alone, for a layer whose own output nothing uses."""
        return self._key_value(self.attention_norm(x), self._cos_sin(positions))

    def _key_value(self, normed: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        key = apply_rotary(_optional(self.key_norm, split_heads(self.key(normed), self.kv_heads)), *cos_sin)
        return key, split_heads(self.value(normed), self.kv_heads)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_cos_sin(positions, self.head_dim, self.rope_base, self.rope_stretch)

    def output_and_mlp(self, x: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None) -> Tensor:
        """Return the layer's output (B, L, W) from its input and the result of attention (B, L, H * D)."""
        x = _residual(x, _optional(self.output_norm, self.output(attended)), gate)
        normed, gate = _norm(self.mlp_norm, x, condition)
        return _residual(x, _optional(self.down_norm, self.mlp(normed)), gate)


def _norm(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (norm(x), None) if condition is None else norm(x, condition)


def _optional(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _residual(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return x + branch if gate is None else x + gate * branch
