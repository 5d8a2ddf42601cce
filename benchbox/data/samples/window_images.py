"""Images of the windows of samples: history, future and subgoal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benchbox.data.dataset.frame_images import load_images
from benchbox.data.dataset.lerobot import RESPONSE, LeRobotDataset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.data.format.metadata import Episode
    from benchbox.registry.contracts import Batch, BatchSpec


class WindowImages:
    """Loader of the images of a dataset that a policy's `spec` asks for.

    Args:
        cameras: the camera of the dataset in each slot, None for an empty slot.
    """

    def __init__(self, dataset: LeRobotDataset, spec: BatchSpec, cameras: Sequence[str | None]) -> None:
        self._dataset = dataset
        self._spec = spec
        self._cameras = cameras

    def fields(self, episode: Episode, frames: np.ndarray, history: np.ndarray) -> Batch:
        """Return the images of frames (n,) with their history (n, T), and those of later frames: the future and the subgoal."""
        spec, windows = self._spec, {"images": history}
        if spec.future:
            future = frames[:, None] + np.arange(1, 1 + spec.future)
            windows["future_images"] = future.clip(max=episode.to_index - 1)
        if spec.subgoal:
            before = episode.from_index - 1  # and so masked
            goals = [self._dataset.subtask_end(i) if self._dataset.text(RESPONSE, i) else before for i in frames.tolist()]
            windows["subgoal_images"] = np.array(goals)[:, None]
        images, masks = self._images(episode, windows)
        fields = {"images": images["images"], "image_mask": masks["images"]}
        if spec.future:
            fields |= {"future_images": images["future_images"], "future_mask": torch.from_numpy(future < episode.to_index)}
        if spec.subgoal:
            fields |= {"subgoal_images": images["subgoal_images"][:, 0], "subgoal_mask": masks["subgoal_images"][:, 0]}
        return fields

    def _images(self, episode: Episode, windows: Mapping[str, np.ndarray]) -> tuple[Batch, Batch]:
        """Return the images (n, T, C, 3, H, W) of windows of frames (n, T), and their masks (n, T, C).

        A mask is false before the episode. Every frame is decoded once, however many windows it is in, and in ascending order.
        """
        spec = self._spec
        images = {
            name: torch.zeros(*frames.shape, spec.cameras, 3, *spec.image_size, dtype=torch.uint8)
            for name, frames in windows.items()
        }
        masks = {name: torch.zeros(*frames.shape, spec.cameras, dtype=torch.bool) for name, frames in windows.items()}
        inside = {name: frames >= episode.from_index for name, frames in windows.items()}
        needed = np.unique(np.concatenate([frames[inside[name]] for name, frames in windows.items()]))
        positions = {name: np.searchsorted(needed, frames[inside[name]]) for name, frames in windows.items()}
        for camera, slot in enumerate(self._cameras):
            if slot is None:
                continue
            loaded = load_images(self._dataset, slot, needed.tolist(), spec.image_size).numpy()
            for name, rows in positions.items():
                images[name].numpy()[:, :, camera][inside[name]] = loaded[rows]
                masks[name].numpy()[:, :, camera] = inside[name]
        return images, masks
