"""A diffusion transformer over a chunk of actions (DiT, arXiv:2212.09748), as in VITRA's action head."""

from __future__ import annotations

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
from .._layers.nn.timestep import embed_timestep
from .._layers.nn.unit import Unit
from .._layers.presets import FORBID_EXTRA

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes

    from .._layers.cost.flops import FlopTally

EPSILON = 1e-6
TIME_WIDTH = 256  # of the timestep embedding


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class DitConfig:
    """Sizes of the transformer."""

    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp: PositiveInt


class AdaLayerNorm(nn.Module):
    """A layer norm whose shift and scale, and with `gated` also the residual gate, are projected from a condition.

    The projection is initialised to 0 (adaLN-Zero): a new layer is the identity.
    """

    def __init__(self, width: int, *, gated: bool) -> None:
        super().__init__()
        self.modulation = Linear(width, (2 + gated) * width)
        for parameter in self.modulation.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, condition: Tensor) -> list[Tensor]:
        """Return `x` (M, L, W) modulated by `condition` (M, W), and the gate (M, 1, W) if there is one."""
        modulation = self.modulation(condition).float()[:, None]
        shift, scale, *gate = modulation.split(x.shape[-1], dim=-1)
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=EPSILON)
        return [output.to(x.dtype) for output in (normed * (1.0 + scale) + shift, *gate)]


class DitLayer(Unit):
    """Self-attention over the tokens of a chunk and an MLP, both modulated by the condition. Queries and keys are normed."""

    def __init__(self, config: DitConfig, axes: Axes) -> None:
        super().__init__(checkpointing=axes.checkpointing)
        self.heads, self.kernel = config.heads, axes.attention
        head_dim = config.width // config.heads
        self.attention_norm = AdaLayerNorm(config.width, gated=True)
        self.query_key_value = _init_linear(config.width, 3 * config.width)
        self.query_norm, self.key_norm = RMSNorm(head_dim, unit=False), RMSNorm(head_dim, unit=False)
        self.output = _init_linear(config.width, config.width)
        self.mlp_norm = AdaLayerNorm(config.width, gated=True)
        self.up = _init_linear(config.width, config.mlp)
        self.down = _init_linear(config.mlp, config.width)

    def block(self, x: Tensor, condition: Tensor, mask: Tensor) -> Tensor:
        """Apply the layer to (M, L, W) with the condition (M, W); `mask` (M, L, L) bool."""
        normed, gate = self.attention_norm(x, condition)
        query, key, value = (split_heads(part, self.heads) for part in self.query_key_value(normed).chunk(3, dim=-1))
        attended = attend(self.query_norm(query), self.key_norm(key), value, mask, self.kernel)
        x = x + gate * self.output(attended)
        normed, gate = self.mlp_norm(x, condition)
        return x + gate * self.down(F.gelu(self.up(normed), approximate="tanh"))


class Dit(nn.Module):
    """Noise predictor for a chunk of actions. Its tokens are condition, state and actions, with causal attention.

    Actions and state are concatenated with masks of their valid dimensions. The sum of the condition and the timestep embedding
    also modulates every norm. A learned vector replaces a dropped condition.
    """

    def __init__(
        self, config: DitConfig, axes: Axes, *, condition_width: int, state_dim: int, action_dim: int, horizon: int
    ) -> None:
        super().__init__()
        width = config.width
        self.no_condition = nn.Parameter(torch.empty(condition_width))
        self.condition_in = _init_linear(condition_width, width, INIT_STD)
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
        self,
        x_t: Tensor,
        action_mask: Tensor,
        timestep: Tensor,
        condition: Tensor,
        unconditional: Tensor,
        state: Tensor,
        state_mask: Tensor,
    ) -> Tensor:
        """Predict the noise (B, D, N, A) in D chunks of every sample.

        Args:
            x_t: (B, D, N, A), noisy actions.
            action_mask: (B, N, A) bool; where False the noisy actions are replaced by 0.
            timestep: (B, D) int64, of the diffusion.
            condition: (B, V).
            unconditional: (B, D) bool, True for chunks whose condition is dropped.
            state: (B, S).
            state_mask: (B, S) bool; where False the state is replaced by 0.
        """
        samples, draws, horizon, _ = x_t.shape
        condition = torch.where(unconditional[..., None], self.no_condition, condition[:, None])  # (B, D, V)
        condition_token = self.condition_in(condition.flatten(0, 1))  # (B * D, W)
        modulation = F.silu(condition_token + self.time_in(embed_timestep(timestep.flatten(), TIME_WIDTH)))
        actions = self.action_in(_concat_mask(x_t, action_mask[:, None].expand_as(x_t)).flatten(0, 1))
        states = self.state_in(_concat_mask(state, state_mask)).repeat_interleave(draws, dim=0)
        x = torch.cat((condition_token[:, None], states[:, None], actions), dim=1) + self.position
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        for layer in self.layers:
            x = layer(x, modulation, mask)
        (x,) = self.norm(x[:, -horizon:], modulation)
        return self.action_out(x).unflatten(0, (samples, draws))


def _concat_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Concatenate the values, set to 0 where the mask is False, with the mask: (..., 2 A)."""
    return torch.cat((torch.where(mask, values, 0.0), mask.to(values.dtype)), dim=-1)


def _init_linear(width: int, output_width: int, std: float | None = None) -> Linear:
    """Return a linear layer with Xavier-uniform weights, or normal weights if `std` is passed, and a bias of 0."""
    linear = Linear(width, output_width)
    nn.init.xavier_uniform_(linear.weight) if std is None else nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


def mlp(*widths: int, activation: nn.Module | None = None) -> nn.Sequential:
    """Return linear layers between the given widths, with activations (by default gelu) between the layers."""
    modules: list[nn.Module] = []
    for width, output_width in pairwise(widths):
        modules += [_init_linear(width, output_width, INIT_STD), activation or nn.GELU()]
    return nn.Sequential(*modules[:-1])


def count_mlp(tally: FlopTally, layers: nn.Sequential, rows: int) -> bool:
    """Count an `mlp` whose input requires no gradient; return whether its output does."""
    requires_grad = False
    for layer in layers:
        if isinstance(layer, Linear):
            requires_grad = tally.count_linear(layer, rows, requires_grad)
    return requires_grad


def count_dit(tally: FlopTally, dit: Dit, draws: int, condition_requires_grad: bool) -> None:
    """Count `Dit.forward` for a number of chunks per sample."""
    horizon = len(dit.position) - 2
    condition = tally.count_linear(dit.condition_in, draws, condition_requires_grad or dit.no_condition.requires_grad)
    modulation = count_mlp(tally, dit.time_in, draws) or condition
    actions = count_mlp(tally, dit.action_in, draws * horizon)
    states = count_mlp(tally, dit.state_in, 1)
    tokens = TokenCount(2 + horizon, condition or actions or states or dit.position.requires_grad)
    for layer in dit.layers:
        assert isinstance(layer, DitLayer)
        with tally.unit(layer):
            tokens = _count_dit_layer(tally, layer, draws, tokens, modulation)
    modulated = tally.count_linear(dit.norm.modulation, draws, modulation)
    tally.count_linear(dit.action_out, draws * horizon, tokens.requires_grad or modulated)


def _count_dit_layer(
    tally: FlopTally, layer: DitLayer, draws: int, tokens: TokenCount, modulation_requires_grad: bool
) -> TokenCount:
    rows, head_dim = draws * tokens.number, layer.output.in_features // layer.heads
    gate = tally.count_linear(layer.attention_norm.modulation, draws, modulation_requires_grad)
    projected = tally.count_linear(layer.query_key_value, rows, tokens.requires_grad or gate)
    qkv_require_grad = projected or is_trainable(layer.query_norm), projected or is_trainable(layer.key_norm), projected
    sizes = draws * layer.heads, tokens.number, tokens.number, head_dim
    attended = tally.count_attention(layer.output, sizes, qkv_require_grad, fused=layer.kernel != "eager")
    requires_grad = tally.count_linear(layer.output, rows, attended) or tokens.requires_grad or gate
    gate = tally.count_linear(layer.mlp_norm.modulation, draws, modulation_requires_grad)
    hidden = tally.count_linear(layer.up, rows, requires_grad or gate)
    return TokenCount(tokens.number, tally.count_linear(layer.down, rows, hidden, saved=gate) or requires_grad or gate)
