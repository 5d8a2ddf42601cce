"""The SigLIP vision tower, without its pooling head."""

from __future__ import annotations

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
    """A pre-norm encoder layer: every patch attends to every patch of its image."""

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

    def block(self, x: Tensor) -> Tensor:
        """(I, patches, W) to the same."""
        normed = self.attention_norm(x)
        query, key, value = (split_heads(project(normed), self.heads) for project in (self.query, self.key, self.value))
        x = x + self.output(attend(query, key, value, None, self.kernel))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Siglip(nn.Module):
    """Pixels to patch features."""

    def __init__(self, config: SiglipConfig, axes: Axes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, kernel_size=config.patch, stride=config.patch)
        self.position = nn.Parameter(torch.empty(config.tokens, config.width))
        self.layers = nn.ModuleList(SiglipLayer(config, axes) for _ in range(config.depth))
        self.norm = LayerNorm(config.width, eps=EPSILON)
        nn.init.normal_(self.position, std=config.width**-0.5)

    def forward(self, pixels: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Features (I, patches, W) of the last frame of images (I, T, 3, H, W) uint8."""
        pixels = pixels[:, -1] if pixels.ndim == 5 else pixels
        scaled = pixels.float() / 127.5 - 1.0
        x = self.patches(to_weight(scaled, self.patches.weight)).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)
