"""Access pattern of lerobot's loader where lerobot is not installed: every image of a sample opens its video and seeks.

It is cheaper than lerobot's: no rows of a table, no checks, no texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import av
import torch

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.data import LeRobotDataset


class RandomAccessFrames(torch.utils.data.Dataset):
    """Frames of all cameras as float32 in [0, 1], and the window of actions, as lerobot delivers them with pyav."""

    def __init__(self, dataset: LeRobotDataset, horizon: int) -> None:
        self._dataset = dataset
        self._horizon = horizon

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        episode = self._dataset.episode_of(index)
        stop = min(index + self._horizon, episode.to_index)
        actions = torch.from_numpy(self._dataset.column("action", index, stop))
        row = {"action": torch.cat([actions, actions[-1:].expand(self._horizon - len(actions), -1)])}
        seconds = (index - episode.from_index) / self._dataset.fps
        return row | {name: decode_frame(span.path, span.from_s + seconds) for name, span in episode.videos.items()}


def decode_frame(path: Path, time_s: float) -> torch.Tensor:
    """Decode the frame at a time: (3, H, W) float32. Every frame from the key frame on is converted to RGB."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        container.seek(round(time_s / stream.time_base) - 1, stream=stream)
        for frame in container.decode(stream):
            image = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1).contiguous()
            if frame.time >= time_s - 1e-4:
                break
    return image.float() / 255
