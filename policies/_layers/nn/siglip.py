"""The SigLIP vision tower, without its pooling head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from ..presets import FORBID_EXTRA
from .attention import attend, split_heads
from .precision import LayerNorm, Linear, to_weight
from .unit import Unit

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes

EPSILON = 1e-6
SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 40.0  # of the time embedding, in frames


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
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
    projection of queries, keys and values, one residual, and no parameter more (MEM, arXiv:2603.03596, section III-C; where it
    leaves a choice, as OpenTau does). When a frame was is told to attention and not added to the residual: what a patch holds
    stays what was seen in it, and the MLP and the plain layers, which know no time, are given what they were trained on.
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
        """(I, patches, W) to the same. Or, with `past` (V, Q, T) bool, True where one of the last Q frames of a video sees one
        of its T: (V * T, patches, W) to those last frames (V * Q, patches, W).
        """
        normed = self.attention_norm(x if past is None else x + embed_frames(past.shape[2], x))
        projected = self.query(last_frames(normed, past)), self.key(normed), self.value(normed)
        query, key, value = (split_heads(part, self.heads) for part in projected)
        if past is not None:
            value = self._over_time(query, key, value, past)
        x = last_frames(x, past) + self.output(attend(query, last_frames(key, past), value, None, self.kernel))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    def _over_time(self, query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> Tensor:
        """Values (V * T, H, patches, D) attended over time, each patch by itself: (V * Q, H, patches, D), like the queries.

        To the kernel every patch is one more head: one mask serves all of a video, and its batch stays that of the videos (some
        fused CUDA kernels launch no more than 65535 of a batch).
        """

        def by_patch(x: Tensor) -> Tensor:  # (V, H * patches, T, D)
            return x.unflatten(0, (len(past), -1)).permute(0, 2, 3, 1, 4).flatten(1, 2)

        attended = attend(by_patch(query), by_patch(key), by_patch(value), past, self.kernel)  # (V, Q, H * patches * D)
        return attended.flatten(0, 1).view_as(query)


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
            if past is None or index not in self.temporal:
                x = layer(x)
            elif index < self.temporal[-1]:
                x = layer(x, past)
            else:  # nothing reads past frames any more
                x, past = layer(x, past[:, -1:]), None
        return self.norm(x)

    @staticmethod
    def _past(videos: int, frames: int, valid: Tensor | None, device: torch.device) -> Tensor:
        """(V, T, T) bool: a frame sees itself and the valid ones before it."""
        order = torch.arange(frames, device=device)
        before = (order[None, :] <= order[:, None]).expand(videos, frames, frames)
        if valid is None:
            return before
        return (before & valid[:, None, :]) | torch.eye(frames, dtype=torch.bool, device=device)


def last_frames(x: Tensor, past: Tensor | None) -> Tensor:
    """Of frames of videos (V * T, ...) those that `past` (V, Q, T) has rows for, the last Q of each; of images all."""
    return x if past is None else x.unflatten(0, (len(past), -1))[:, -past.shape[1] :].flatten(0, 1)


def embed_frames(frames: int, like: Tensor) -> Tensor:
    """When each frame of a video was, as an addend (V * T, 1, W) in the dtype of `like` (V * T, patches, W).

    Sines and cosines, formed in float64, of the frame's number, 0 for the current one and negative before it, less those of 0:
    the current frame is told nothing, so that a video of one frame is an image. Numbers of frames and not seconds, because a
    policy is trained at one spacing of its history; the longest period tells 40 of them apart.
    """
    width = like.shape[-1]
    number = torch.arange(1 - frames, 1, dtype=torch.float64, device=like.device)
    periods = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** torch.linspace(
        0.0, 1.0, width // 2, dtype=torch.float64, device=like.device
    )
    angles = 2 * math.pi * number[:, None] / periods
    embedded = torch.cat((angles.sin(), angles.cos() - 1.0), dim=-1).to(like.dtype)
    return embedded.repeat(len(like) // frames, 1)[:, None]
