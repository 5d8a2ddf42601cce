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
    """A pre-norm encoder layer in which every patch attends to every patch of its image.

    With a temporal mask, values are first replaced by the result of causal attention over time, separately for each patch: one
    norm, one projection of queries, keys and values, one residual, and no additional parameter (MEM, arXiv:2603.03596, section
    III-C; where it leaves a choice, as in OpenTau). The time embedding is added to the input of attention and not to the
    residual stream, so that the MLP and the layers without temporal attention get the inputs on which they were pretrained.
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

    def block(self, x: Tensor, temporal_mask: Tensor | None = None) -> Tensor:
        """Apply the layer to images (I, patches, W), or to videos if there is a temporal mask.

        Args:
            x: (I, patches, W), or (V * T, patches, W) with a temporal mask.
            temporal_mask: (V, Q, T) bool, True where one of the last Q frames of a video attends to one of its T frames.

        Returns:
            (I, patches, W), or the last Q frames of each video (V * Q, patches, W).
        """
        normed = self.attention_norm(x if temporal_mask is None else x + embed_frames(temporal_mask.shape[2], x))
        projected = self.query(last_frames(normed, temporal_mask)), self.key(normed), self.value(normed)
        query, key, value = (split_heads(part, self.heads) for part in projected)
        if temporal_mask is not None:
            value = self._attend_over_time(query, key, value, temporal_mask)
        attended = attend(query, last_frames(key, temporal_mask), value, None, self.kernel)
        x = last_frames(x, temporal_mask) + self.output(attended)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    def _attend_over_time(self, query: Tensor, key: Tensor, value: Tensor, temporal_mask: Tensor) -> Tensor:
        """Attend over time, separately for each patch: values (V * T, H, patches, D) to (V * Q, H, patches, D).

        Patches are passed to the kernel as additional heads, so that one mask covers a video and the batch size remains the
        number of videos (some fused CUDA kernels support batches of at most 65535).
        """

        def by_patch(x: Tensor) -> Tensor:  # (V, H * patches, T, D)
            return x.unflatten(0, (len(temporal_mask), -1)).permute(0, 2, 3, 1, 4).flatten(1, 2)

        attended = attend(by_patch(query), by_patch(key), by_patch(value), temporal_mask, self.kernel)
        return attended.flatten(0, 1).view_as(query)  # from (V, Q, H * patches * D)


class Siglip(nn.Module):
    """Vision tower from pixels to patch features. With `temporal_every` every n-th layer also attends over time."""

    def __init__(self, config: SiglipConfig, axes: Axes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, kernel_size=config.patch, stride=config.patch)
        self.position = nn.Parameter(torch.empty(config.tokens, config.width))
        self.layers = nn.ModuleList(SiglipLayer(config, axes) for _ in range(config.depth))
        self.norm = LayerNorm(config.width, eps=EPSILON)
        every = config.temporal_every
        self.temporal_layers = [] if every is None else list(range(every - 1, config.depth, every))
        nn.init.normal_(self.position, std=config.width**-0.5)

    def forward(self, pixels: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return features (V, patches, W) of the current (last) frame of videos (V, T, 3, H, W) uint8.

        No other frame attends to a frame that is not `valid` (V, T). Without temporal layers past frames are ignored.
        """
        videos, frames = pixels.shape[:2]
        if not self.temporal_layers or frames == 1:
            pixels, frames = pixels[:, -1:], 1
        scaled = pixels.flatten(0, 1).float() / 127.5 - 1.0
        x = self.patches(to_weight(scaled, self.patches.weight)).flatten(2).transpose(1, 2) + self.position
        mask = self._temporal_mask(videos, frames, valid, x.device) if frames > 1 else None
        for index, layer in enumerate(self.layers):
            if mask is None or index not in self.temporal_layers:
                x = layer(x)
            elif index < self.temporal_layers[-1]:
                x = layer(x, mask)
            else:  # later layers do not use past frames
                x, mask = layer(x, mask[:, -1:]), None
        return self.norm(x)

    @staticmethod
    def _temporal_mask(videos: int, frames: int, valid: Tensor | None, device: torch.device) -> Tensor:
        """Return (V, T, T) bool: a frame attends to itself and to earlier valid frames."""
        order = torch.arange(frames, device=device)
        causal = (order[None, :] <= order[:, None]).expand(videos, frames, frames)
        if valid is None:
            return causal
        return (causal & valid[:, None, :]) | torch.eye(frames, dtype=torch.bool, device=device)


def last_frames(x: Tensor, temporal_mask: Tensor | None) -> Tensor:
    """Return the last Q frames of each video in (V * T, ...), for a mask (V, Q, T); without a mask return `x`."""
    if temporal_mask is None:
        return x
    return x.unflatten(0, (len(temporal_mask), -1))[:, -temporal_mask.shape[1] :].flatten(0, 1)


def embed_frames(frames: int, like: Tensor) -> Tensor:
    """Embed the time of each frame of a video: (V * T, 1, W) in the dtype of `like` (V * T, patches, W), to be added to it.

    The embedding has sines and cosines, computed in float64, of the frame's index, 0 for the current frame and negative before
    it, minus those of 0: the embedding of the current frame is 0, so that a video of one frame equals an image. Indices and not
    seconds, because a policy is trained at one spacing of its history; the longest period distinguishes 40 frames.
    """
    width = like.shape[-1]
    index = torch.arange(1 - frames, 1, dtype=torch.float64, device=like.device)
    periods = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** torch.linspace(
        0.0, 1.0, width // 2, dtype=torch.float64, device=like.device
    )
    angles = 2 * math.pi * index[:, None] / periods
    embedding = torch.cat((angles.sin(), angles.cos() - 1.0), dim=-1).to(like.dtype)
    return embedding.repeat(len(like) // frames, 1)[:, None]
