"""Latents of videos, made without a tokenizer, and the tokens that a generating stream is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

SPACE, TIME, CHANNELS = 16, 4, 48  # pixels to a side and frames to a latent, and numbers in it
PATCH = 2  # latents to a side of a token
TOKEN = CHANNELS * PATCH**2  # numbers in it
_SIDE = 4  # of the squares that are averaged: 3 colours of 4 x 4 squares are the channels
_MIDDLE, _SPREAD = 127.5, 64.0  # of mean colours, about


def encode(video: Tensor) -> Tensor:
    """A stand-in for the video tokenizer, with its shapes and nothing learned.

    A latent holds the coarsest coefficients of the Haar wavelet transform in space and time, which is orthonormal: the mean
    colours of squares of 4 x 4 pixels over four frames. The first frame is by itself, so latents are causal in time. A constant
    makes them about of unit size.

    Args:
        video: (B, 1 + F, C, 3, H, W) uint8; F is a multiple of 4, H and W of 16.

    Returns:
        (B, 1 + F / 4, C, 48, H / 16, W / 16) float32.
    """
    squares = F.avg_pool2d(video.flatten(0, 2).float(), _SIDE)
    frames = F.pixel_unshuffle(squares, SPACE // _SIDE).unflatten(0, video.shape[:3])
    later = frames[:, 1:].unflatten(1, (-1, TIME)).mean(dim=2)
    return (torch.cat((frames[:, :1], later), dim=1) - _MIDDLE) / _SPREAD


def patches(latents: Tensor) -> Tensor:
    """Squares of 2 x 2 latents as tokens: (B, G, C, 48, h, w) to (B, G * C * h / 2 * w / 2, 192), in the order of `grid`."""
    squares = F.pixel_unshuffle(latents.flatten(0, 2), PATCH)
    return squares.flatten(2).transpose(1, 2).unflatten(0, latents.shape[:3]).flatten(1, 3)


def grid(shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Where the tokens of a video of that many latent frames, cameras, rows and columns of tokens are: (L, 3) int64.

    The frame of the video that a token ends with, its row, and its column, where cameras stand side by side.
    """
    sizes = (torch.arange(size, device=device) for size in shape)
    groups, cameras, rows, columns = torch.meshgrid(*sizes, indexing="ij")
    return torch.stack((TIME * groups, rows, shape[3] * cameras + columns), dim=-1).flatten(0, 3)
