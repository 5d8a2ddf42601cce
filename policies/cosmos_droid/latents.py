"""Video latents, computed without a learned tokenizer, and their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

SPATIAL_FACTOR, TEMPORAL_FACTOR = 16, 4  # pixels per side and frames of a latent
LATENT_CHANNELS = 48
PATCH = 2  # latents per side of a token
TOKEN_DIM = LATENT_CHANNELS * PATCH**2
_POOL = 4  # pixels per side of an averaged square: the channels are 4 x 4 squares of 3 colours
_MEAN, _STD = 127.5, 64.0  # approximately, of averaged colours


def encode(video: Tensor) -> Tensor:
    """Encode a video with the shapes of the video tokenizer, but without learned parameters.

    A latent has the coarsest coefficients of the Haar wavelet transform in space and time, which is orthonormal: the mean
    colours of squares of 4 x 4 pixels over four frames. The first frame is encoded alone, so latents are causal in time. They
    are shifted and scaled to about unit variance.

    Args:
        video: (B, 1 + F, C, 3, H, W) uint8; F is a multiple of 4, H and W of 16.

    Returns:
        (B, 1 + F / 4, C, 48, H / 16, W / 16) float32.
    """
    squares = F.avg_pool2d(video.flatten(0, 2).float(), _POOL)
    frames = F.pixel_unshuffle(squares, SPATIAL_FACTOR // _POOL).unflatten(0, video.shape[:3])
    future = frames[:, 1:].unflatten(1, (-1, TEMPORAL_FACTOR)).mean(dim=2)
    return (torch.cat((frames[:, :1], future), dim=1) - _MEAN) / _STD


def patchify(latents: Tensor) -> Tensor:
    """Turn squares of 2 x 2 latents into tokens.

    Args:
        latents: (B, G, C, 48, h, w).

    Returns:
        (B, G * C * h / 2 * w / 2, 192), in the order of `grid_positions`.
    """
    squares = F.pixel_unshuffle(latents.flatten(0, 2), PATCH)
    return squares.flatten(2).transpose(1, 2).unflatten(0, latents.shape[:3]).flatten(1, 3)


def grid_positions(shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Return frame, row and column of each token of a video: (L, 3) int64.

    The frame is the last video frame of the token's latent. Columns of several cameras are numbered side by side.

    Args:
        shape: numbers of latent frames, cameras, rows and columns of tokens.
        device: of the result.
    """
    sizes = (torch.arange(size, device=device) for size in shape)
    groups, cameras, rows, columns = torch.meshgrid(*sizes, indexing="ij")
    return torch.stack((TEMPORAL_FACTOR * groups, rows, shape[3] * cameras + columns), dim=-1).flatten(0, 3)
