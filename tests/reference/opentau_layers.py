"""Joint layers of OpenTau's pi policies: a Gemma or Gemma 3 backbone, and a Gemma expert with adaRMS that attends to its keys.

Written from the facts of the public source (TensorAuto/OpenTau, August 2026), with the weights of our policies by their names.
The prefix runs first and leaves the keys and values of every layer; the expert attends to those that it may see, and to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Cache = list[tuple[Tensor, Tensor]]  # keys and values (B, P, G, D) of each layer

BIG_NEGATIVE = -2.3819763e38  # score of a masked key


@dataclass(frozen=True)
class Layers:
    """Weights by name, and what the layers do with them.

    `bases` and `stretches` are those of the rotary embedding of each layer. `dropout` is applied to the outputs of attention
    and MLP.
    """

    weights: Mapping[str, Tensor]
    heads: int
    head_dim: int
    bases: tuple[float, ...]
    stretches: tuple[float, ...]
    dropout: Callable[[Tensor], Tensor] = lambda x: x

    def prefix(self, hidden: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Cache]:
        """Return the final normed states (B, P, W) of the prefix, and its keys and values; `mask` (B, P, P) bool."""
        cache = []
        for layer in range(len(self.bases)):
            name = f"model.layers.{layer}.backbone"
            query, key, value = self._qkv(layer, name, rms(hidden, self.weights[f"{name}.attention_norm.weight"]), positions)
            branch = self._attend(query, key, value, mask, name)
            hidden = hidden + self._optional_norm(branch, f"{name}.output_norm")
            branch = self._mlp(rms(hidden, self.weights[f"{name}.mlp_norm.weight"]), name)
            hidden = hidden + self._optional_norm(branch, f"{name}.down_norm")
            cache.append((key, value))
        return rms(hidden, self.weights["model.norm.weight"]), cache

    def suffix(self, hidden: Tensor, condition: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Return the final normed states (B, S, V) of the expert; `mask` (B, S, P + S) bool, `condition` (B, V)."""
        for layer, (prefix_key, prefix_value) in enumerate(cache):
            name = f"model.layers.{layer}.expert"
            normed, gate = self._adaptive(hidden, condition, f"{name}.attention_norm")
            query, key, value = self._qkv(layer, name, normed, positions)
            key, value = torch.cat((prefix_key, key), dim=1), torch.cat((prefix_value, value), dim=1)
            hidden = hidden + gate * self._attend(query, key, value, mask, name)
            normed, gate = self._adaptive(hidden, condition, f"{name}.mlp_norm")
            hidden = hidden + gate * self._mlp(normed, name)
        return self._adaptive(hidden, condition, "model.expert_norm")[0]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Apply the linear layer of that name."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _qkv(self, layer: int, name: str, x: Tensor, positions: Tensor) -> list[Tensor]:
        projected = [self.linear(x, f"{name}.{part}").unflatten(-1, (-1, self.head_dim)) for part in ("query", "key", "value")]
        for index, part in enumerate(("query", "key")):
            normed = self._optional_norm(projected[index], f"{name}.{part}_norm")
            projected[index] = rotate(normed, positions, self.bases[layer], self.stretches[layer])
        return projected

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, name: str) -> Tensor:
        repeats = self.heads // key.shape[2]
        key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * self.head_dim**-0.5
        weights = torch.where(mask[:, None], scores, BIG_NEGATIVE).softmax(dim=-1)
        attended = torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)
        return self.dropout(self.linear(attended, f"{name}.output"))

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = F.gelu(self.linear(x, f"{name}.mlp.gate"), approximate="tanh")
        return self.dropout(self.linear(gate * self.linear(x, f"{name}.mlp.up"), f"{name}.mlp.down"))

    def _optional_norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights.get(f"{name}.weight")
        return x if weight is None else rms(x, weight)

    def _adaptive(self, x: Tensor, condition: Tensor, name: str) -> tuple[Tensor, Tensor]:
        scale, shift, gate = self.linear(condition, f"{name}.modulation")[:, None].chunk(3, dim=-1)
        return normalise(x) * (1 + scale) + shift, gate


def normalise(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return normalise(x) * (1 + weight)


def rotate(x: Tensor, positions: Tensor, base: float, stretch: float) -> Tensor:
    """Rotate pairs (i, i + D/2) of `x` (B, L, H, D) by position / stretch / base^(2i/D)."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] / stretch / base ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1)


def attention_mask(starts: Tensor, valid: Tensor) -> Tensor:
    """Return (B, L, L) bool: a token attends to those whose number of group starts is not greater, if both are valid."""
    groups = starts.long().cumsum(dim=0)
    return (groups[None, :] <= groups[:, None]) & valid[:, None, :] & valid[:, :, None]


def suffix_mask(prefix_valid: Tensor, suffix_tokens: int) -> Tensor:
    """Return (B, S, P + S) bool: the suffix is one group that sees all valid tokens of the prefix."""
    return F.pad(prefix_valid, (0, suffix_tokens), value=True)[:, None].expand(-1, suffix_tokens, -1)


def embed_time(time: Tensor, width: int) -> Tensor:
    """Return sines, then cosines, of width / 2 periods from 4e-3 to 4, geometrically spaced."""
    periods = 4e-3 * 1000 ** torch.linspace(0, 1, width // 2, dtype=torch.float64)
    angles = time.double()[:, None] * 2 * torch.pi / periods
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()
