"""A diffusion transformer over a chunk of actions (DiT, arXiv:2212.09748), as VITRA's head has it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from .._layers.cost.flops import TokenCount, is_trainable
from .._layers.nn.attention import attend, split_heads
from .._layers.nn.decoder import INIT_STD
from .._layers.nn.norms import RMSNorm
from .._layers.nn.precision import Linear
from .._layers.nn.unit import Unit
from .._layers.presets import FORBID_EXTRA

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes

    from .._layers.cost.flops import FlopTally

EPSILON = 1e-6
TIME_WIDTH, LONGEST_PERIOD = 256, 10_000  # of the embedding of a step; the latter over 2 pi, in steps


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class DitConfig:
    """Sizes of the transformer."""

    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp: PositiveInt


class AdaLayerNorm(nn.Module):
    """A layer norm whose shift and scale, and with `gated` the gate of the branch that follows, come from a condition.

    All of them start at 0 (adaLN-zero): a new layer is the identity.
    """

    def __init__(self, width: int, *, gated: bool) -> None:
        super().__init__()
        self.modulation = Linear(width, (2 + gated) * width)
        for parameter in self.modulation.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, condition: Tensor) -> list[Tensor]:
        """`x` (M, L, W) modulated by `condition` (M, W), and the gate (M, 1, W) where there is one."""
        modulation = self.modulation(condition).float()[:, None]
        shift, scale, *gate = modulation.split(x.shape[-1], dim=-1)
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=EPSILON)
        return [part.to(x.dtype) for part in (normed * (1.0 + scale) + shift, *gate)]


class DitLayer(Unit):
    """Attention among the tokens of a chunk and an MLP, both modulated by the condition. Queries and keys are normed."""

    def __init__(self, config: DitConfig, axes: Axes) -> None:
        super().__init__(checkpointing=axes.checkpointing)
        self.heads, self.kernel = config.heads, axes.attention
        head = config.width // config.heads
        self.attention_norm = AdaLayerNorm(config.width, gated=True)
        self.query_key_value = _linear(config.width, 3 * config.width)
        self.query_norm, self.key_norm = RMSNorm(head, unit=False), RMSNorm(head, unit=False)
        self.output = _linear(config.width, config.width)
        self.mlp_norm = AdaLayerNorm(config.width, gated=True)
        self.up = _linear(config.width, config.mlp)
        self.down = _linear(config.mlp, config.width)

    def block(self, x: Tensor, condition: Tensor, visible: Tensor) -> Tensor:
        """(M, L, W) one layer on, given the condition (M, W); `visible` (M, L, L) bool."""
        normed, gate = self.attention_norm(x, condition)
        query, key, value = (split_heads(part, self.heads) for part in self.query_key_value(normed).chunk(3, dim=-1))
        attended = attend(self.query_norm(query), self.key_norm(key), value, visible, self.kernel)
        x = x + gate * self.output(attended)
        normed, gate = self.mlp_norm(x, condition)
        return x + gate * self.down(F.gelu(self.up(normed), approximate="tanh"))


class Dit(nn.Module):
    """Tells the noise in a chunk of actions. Its tokens are a condition, the state and the actions; none sees a later one.

    Actions and state come each beside a mask of what is known of them. The condition, added to the step of the diffusion, also
    modulates every norm; a learned one takes its place where there is none.
    """

    def __init__(
        self, config: DitConfig, axes: Axes, *, condition_width: int, state_dim: int, action_dim: int, horizon: int
    ) -> None:
        super().__init__()
        width = config.width
        self.no_condition = nn.Parameter(torch.empty(condition_width))
        self.condition_in = _linear(condition_width, width, INIT_STD)
        self.time_in = mlp(TIME_WIDTH, width, width, activation=nn.SiLU())
        self.state_in = mlp(2 * state_dim, 4 * width, width, width)
        self.action_in = mlp(2 * action_dim, width, width)
        self.position = nn.Parameter(torch.empty(2 + horizon, width))
        self.layers = nn.ModuleList(DitLayer(config, axes) for _ in range(config.depth))
        self.norm = AdaLayerNorm(width, gated=False)
        self.action_out = Linear(width, action_dim)
        nn.init.normal_(self.no_condition, std=INIT_STD)
        nn.init.normal_(self.position, std=width**-0.5)
        for parameter in self.action_out.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, noisy: Tensor, real: Tensor, step: Tensor, condition: Tensor, dropped: Tensor, state: Tensor, known: Tensor
    ) -> Tensor:
        """The noise (B, D, N, A) in D chunks of every sample.

        Args:
            noisy: (B, D, N, A).
            real: (B, N, A) bool; where False the chunks are not looked at.
            step: (B, D) int64, of the diffusion.
            condition: (B, V).
            dropped: (B, D) bool: those that do without it.
            state: (B, S).
            known: (B, S) bool, of the state.
        """
        samples, draws, horizon, _ = noisy.shape
        given = torch.where(dropped[..., None], self.no_condition, condition[:, None])  # (B, D, V)
        told = self.condition_in(given.flatten(0, 1))  # (B * D, W)
        modulating = F.silu(told + self.time_in(embed_timestep(step.flatten())))
        actions = self.action_in(_beside(noisy, real[:, None].expand_as(noisy)).flatten(0, 1))
        states = self.state_in(_beside(state, known)).repeat_interleave(draws, dim=0)
        x = torch.cat((told[:, None], states[:, None], actions), dim=1) + self.position
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        for layer in self.layers:
            x = layer(x, modulating, visible)
        (x,) = self.norm(x[:, -horizon:], modulating)
        return self.action_out(x).unflatten(0, (samples, draws))


def embed_timestep(step: Tensor) -> Tensor:
    """Cosines and sines (M, 256) float32 of the step (M,), periods spaced geometrically from 2 pi on; formed in float64."""
    places = torch.arange(TIME_WIDTH // 2, dtype=torch.float64, device=step.device)
    angles = step[:, None] * (-math.log(LONGEST_PERIOD) * places / (TIME_WIDTH // 2)).exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def _beside(values: Tensor, mask: Tensor) -> Tensor:
    """Values, 0 where the mask is False, and the mask: (..., 2 A)."""
    return torch.cat((torch.where(mask, values, 0.0), mask.to(values.dtype)), dim=-1)


def _linear(width: int, into: int, std: float | None = None) -> Linear:
    """Weights uniform as Xavier's, or normal, and no bias at first."""
    linear = Linear(width, into)
    nn.init.xavier_uniform_(linear.weight) if std is None else nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


def mlp(*widths: int, activation: nn.Module | None = None) -> nn.Sequential:
    """Linear layers between those widths, and activations, gelu by default, between the layers."""
    modules: list[nn.Module] = []
    for width, into in pairwise(widths):
        modules += [_linear(width, into, INIT_STD), activation or nn.GELU()]
    return nn.Sequential(*modules[:-1])


def count_mlp(tally: FlopTally, layers: nn.Sequential, rows: int) -> bool:
    """What an `mlp` costs, of so many rows that need no gradient; whether its answer needs one."""
    below = False
    for layer in layers:
        if isinstance(layer, Linear):
            below = tally.through(layer, rows, below)
    return below


def count_dit(tally: FlopTally, dit: Dit, draws: int, below: bool) -> None:
    """`Dit.forward`, of so many chunks of a sample; `below` is whether the condition needs a gradient."""
    horizon = len(dit.position) - 2
    told = tally.through(dit.condition_in, draws, below or dit.no_condition.requires_grad)
    modulating = count_mlp(tally, dit.time_in, draws) or told
    actions = count_mlp(tally, dit.action_in, draws * horizon)
    states = count_mlp(tally, dit.state_in, 1)
    x = TokenCount(2 + horizon, told or actions or states or dit.position.requires_grad)
    for layer in dit.layers:
        assert isinstance(layer, DitLayer)
        with tally.unit(layer):
            x = _count_layer(tally, layer, draws, x, modulating)
    modulated = tally.through(dit.norm.modulation, draws, modulating)
    tally.through(dit.action_out, draws * horizon, x.below or modulated)


def _count_layer(tally: FlopTally, layer: DitLayer, draws: int, x: TokenCount, modulating: bool) -> TokenCount:
    rows, width = draws * x.number, layer.output.in_features // layer.heads
    gate = tally.through(layer.attention_norm.modulation, draws, modulating)
    projected = tally.through(layer.query_key_value, rows, x.below or gate)
    needing = projected or is_trainable(layer.query_norm), projected or is_trainable(layer.key_norm), projected
    sizes = draws * layer.heads, x.number, x.number, width
    attended = tally.attend(layer.output, sizes, needing, fused=layer.kernel != "eager")
    below = tally.through(layer.output, rows, attended) or x.below or gate
    gate = tally.through(layer.mlp_norm.modulation, draws, modulating)
    hidden = tally.through(layer.up, rows, below or gate)
    return TokenCount(x.number, tally.through(layer.down, rows, hidden, kept=gate) or below or gate)
