"""Images of a dataset's frames in the size that a policy takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchbox.data.dataset.lerobot import LeRobotDataset


def load_images(dataset: LeRobotDataset, camera: str, frames: Sequence[int], size: tuple[int, int]) -> Tensor:
    """Return frames of a camera, letterboxed to `size`: (n, 3, height, width) uint8. Frames in ascending order load fastest.

    Raises:
        DataError: an image is missing or damaged.
    """
    pixels = [dataset.pixels(camera, frame) for frame in frames]
    if len({image.shape for image in pixels}) == 1:
        return letterbox(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), size)
    return torch.stack([letterbox(torch.from_numpy(image).permute(2, 0, 1), size) for image in pixels])


def letterbox(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images (..., 3, H, W) uint8 to fit `size` without distortion, and centre them between black bars.

    Sides are rounded down, as in openpi and LeRobot. Shrinking averages, as with openpi's Pillow; LeRobot's does not. Values do
    not depend on the strides of the images. With the channels of a pixel side by side it is fastest.
    """
    height, width = images.shape[-2:]
    if (height, width) == size:
        return images
    ratio = max(height / size[0], width / size[1])
    inner = (max(1, int(height / ratio)), max(1, int(width / ratio)))
    batch = images if images.ndim == 4 else images[None]
    resized = F.interpolate(batch, inner, mode="bilinear", align_corners=False, antialias=True).view(*images.shape[:-2], *inner)
    if inner == size:
        return resized
    out = torch.zeros(*images.shape[:-2], *size, dtype=torch.uint8)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    out[..., top : top + inner[0], left : left + inner[1]] = resized
    return out
