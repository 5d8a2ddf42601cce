"""Images of a dataset's frames in the size that a policy takes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.data.dataset.lerobot import LeRobotDataset
    from benchbox.registry.contracts import BatchSpec


class FrameImages:
    """Letterboxed images. Those of recent frames are kept where the windows of consecutive samples overlap."""

    def __init__(self, dataset: LeRobotDataset, spec: BatchSpec) -> None:
        self._dataset = dataset
        self._size = spec.image_size
        window = spec.history + spec.future + spec.subgoal
        self._capacity = spec.cameras * (window + 1) if window > 1 else 0  # images
        self._recent: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    def write(self, camera: str, index: int, out: Tensor) -> None:
        """Write frame `index` of a camera into `out` (3, H, W) uint8.

        Raises:
            DataError: the image is missing or damaged.
        """
        if not self._capacity:
            write_letterboxed(self._dataset.pixels(camera, index), out)
            return
        key = camera, index
        image = self._recent.get(key)
        if image is None:
            image = torch.empty(3, *self._size, dtype=torch.uint8)
            write_letterboxed(self._dataset.pixels(camera, index), image)
            self._recent[key] = image
            if len(self._recent) > self._capacity:
                self._recent.popitem(last=False)
        else:
            self._recent.move_to_end(key)
        out.copy_(image)


def letterbox(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize an image (3, H, W) uint8 to fit `size` without distortion, and centre it between black bars.

    Sides are rounded down, as in openpi and LeRobot. Shrinking averages, as with openpi's Pillow; LeRobot's does not.
    """
    if tuple(image.shape[1:]) == size:
        return image
    out = torch.empty(3, *size, dtype=torch.uint8)
    write_letterboxed(image, out)
    return out


def write_letterboxed(image: Tensor, out: Tensor) -> None:
    """Write an image (3, H, W) uint8 into `out` (3, height, width) uint8, as `letterbox` returns it.

    The result does not depend on the strides of the image. With the channels of a pixel side by side it is fastest.
    """
    height, width = image.shape[1:]
    size = out.shape[1:]
    if (height, width) == size:
        np.copyto(out.numpy(), image.numpy())  # faster than torch where it changes the order of dimensions
        return
    ratio = max(height / size[0], width / size[1])
    inner = (max(1, int(height / ratio)), max(1, int(width / ratio)))
    resized = F.interpolate(image[None], inner, mode="bilinear", align_corners=False, antialias=True)[0]
    if inner != size:
        out.zero_()
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    out[:, top : top + inner[0], left : left + inner[1]] = resized
