"""The SigLIP vision tower, without its pooling head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from .attention import attend, split_heads
from .precision import LayerNorm, Linear, to_weight
from .presets import CLOSED
from .unit import Unit

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes

EPSILON = 1e-6
SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 40.0  # of the time embedding, in frames


@dataclass(config=CLOSED, frozen=True, slots=True, kw_only=True)
class SiglipConfig:
    """Sizes of the tower. `image` and `patch` are in pixels; an image gives (image // patch)^2 tokens."""

    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp: PositiveInt
    image: PositiveInt
    patch: PositiveInt
    temporal_every: PositiveInt | None = None  # every n-th layer also attends over time

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


class SiglipLayer(Unit):
    """A pre-norm encoder layer: every patch attends to every patch of its image.

    Shown what of a video is past, its values first become those of causal attention over time, patch by patch: one norm, one
    projection of queries, keys and values, one residual, and no parameter more (pi05_mem's space-time encoder).
    """

    def __init__(self, config: SiglipConfig, axes: Axes) -> None:
        super().__init__(checkpointing=axes.checkpointing)
        self.heads, self.kernel = config.heads, axes.attention
        self.attention_norm = LayerNorm(config.width, eps=EPSILON)
        self.query = Linear(config.width, config.width)
        self.key = Linear(config.width, config.width)
        self.value = Linear(config.width, config.width)
        self.output = Linear(config.width, config.width)
        self.mlp_norm = LayerNorm(config.width, eps=EPSILON)
        self.up = Linear(config.width, config.mlp)
        self.down = Linear(config.mlp, config.width)
        for linear in (self.query, self.key, self.value, self.output, self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def block(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        """(I, patches, W) to the same; or frames of videos (V * T, patches, W), with `past` (V, T, T) bool, True where a frame
        sees another.
        """
        told = x if past is None else x + embed_age(past.shape[1], x)
        normed = self.attention_norm(told)
        query, key, value = (split_heads(project(normed), self.heads) for project in (self.query, self.key, self.value))
        if past is not None:
            value = self._over_time(query, key, value, past)
        # The age is told to attention and not kept: what a patch holds stays what was seen in it.
        x = x + self.output(attend(query, key, value, None, self.kernel))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    def _over_time(self, query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> Tensor:
        """Values (V * T, H, patches, D) attended over time, each patch by itself."""
        videos, frames, _ = past.shape
        patches = value.shape[2]

        def by_patch(x: Tensor) -> Tensor:  # (V * patches, H, T, D)
            return x.unflatten(0, (videos, frames)).permute(0, 3, 2, 1, 4).flatten(0, 1)

        visible = past.repeat_interleave(patches, dim=0)
        attended = attend(by_patch(query), by_patch(key), by_patch(value), visible, self.kernel)
        attended = attended.unflatten(0, (videos, patches)).transpose(1, 2).flatten(0, 1)  # (V * T, patches, W)
        return split_heads(attended, self.heads)


class Siglip(nn.Module):
    """Pixels to patch features. With `temporal_every` in its config every n-th layer attends over time as well."""

    def __init__(self, config: SiglipConfig, axes: Axes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, kernel_size=config.patch, stride=config.patch)
        self.position = nn.Parameter(torch.empty(config.tokens, config.width))
        self.layers = nn.ModuleList(SiglipLayer(config, axes) for _ in range(config.depth))
        self.norm = LayerNorm(config.width, eps=EPSILON)
        every = config.temporal_every
        self.temporal = [] if every is None else list(range(every - 1, config.depth, every))
        nn.init.normal_(self.position, std=config.width**-0.5)

    def forward(self, pixels: Tensor, valid: Tensor | None = None) -> Tensor:
        """Features (V, patches, W) of the current frame, the last, of videos (V, T, 3, H, W) uint8.

        A frame that is not `valid` (V, T) is seen by no other. Without layers that attend over time the past is not looked at.
        """
        videos, frames = pixels.shape[:2]
        if not self.temporal or frames == 1:
            pixels, frames = pixels[:, -1:], 1
        scaled = pixels.flatten(0, 1).float() / 127.5 - 1.0
        x = self.patches(to_weight(scaled, self.patches.weight)).flatten(2).transpose(1, 2) + self.position
        past = self._past(videos, frames, valid, x.device) if frames > 1 else None
        for index, layer in enumerate(self.layers):
            x = layer(x, past) if past is not None and index in self.temporal else layer(x)
            if past is not None and index == self.temporal[-1]:
                x, past = x.unflatten(0, (videos, frames))[:, -1], None  # what follows concerns the current frame alone
        return self.norm(x)

    @staticmethod
    def _past(videos: int, frames: int, valid: Tensor | None, device: torch.device) -> Tensor:
        """(V, T, T) bool: a frame sees itself and the valid ones before it."""
        order = torch.arange(frames, device=device)
        before = (order[None, :] <= order[:, None]).expand(videos, frames, frames)
        if valid is None:
            return before
        return (before & valid[:, None, :]) | torch.eye(frames, dtype=torch.bool, device=device)


def embed_age(frames: int, like: Tensor) -> Tensor:
    """How long ago each frame of a video was, in frames, as an addend (V * T, 1, W) in the dtype of `like` (V * T, patches, W).

    Sines and cosines with periods spaced geometrically from 4e-3 to 40, formed in float64, less those of now: the current frame
    is told nothing, so that a video of one frame is an image.
    """
    width = like.shape[-1]
    age = torch.arange(frames - 1, -1, -1, dtype=torch.float64, device=like.device)
    periods = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** torch.linspace(
        0.0, 1.0, width // 2, dtype=torch.float64, device=like.device
    )
    angles = 2 * math.pi * age[:, None] / periods
    embedded = torch.cat((angles.sin(), angles.cos() - 1.0), dim=-1).to(like.dtype)
    return embedded.repeat(len(like) // frames, 1)[:, None]
