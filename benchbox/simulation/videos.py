"""Videos and still images of episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import av
import numpy as np

from benchbox.data.video.files import VideoWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STILLS = 4  # of an episode, at equal distances


def write_video(path: Path, frames: Sequence[np.ndarray], fps: float) -> None:
    """Write frames (H, W, 3) uint8 as an H.264 file, which has even sides: an odd one is extended by its last row or column."""
    height, width = (side + side % 2 for side in frames[0].shape[:2])
    writer = VideoWriter(path, fps=max(1, round(fps)), height=height, width=width)
    for number, frame in enumerate(frames):
        missing = ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0))
        writer.add(np.pad(frame, missing, mode="edge"), key_frame=number == 0)
    writer.close()


def write_stills(folder: Path, name: str, frames: Sequence[np.ndarray]) -> list[str]:
    """Write the first, the last and two frames between them as PNG, and return the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = dict.fromkeys(round(i * (len(frames) - 1) / (STILLS - 1)) for i in range(STILLS))
    names = []
    for number in numbers:
        path = folder / f"{name}-{number:03d}.png"
        path.write_bytes(encode_png(frames[number]))
        names.append(path.name)
    return names


def encode_png(image: np.ndarray) -> bytes:
    """Return an image (H, W, 3) uint8 as a PNG file."""
    codec = av.CodecContext.create("png", "w")
    assert isinstance(codec, av.VideoCodecContext)
    codec.height, codec.width, codec.pix_fmt = image.shape[0], image.shape[1], "rgb24"
    codec.time_base = 1
    frame = av.VideoFrame.from_ndarray(image, format="rgb24")
    return b"".join(bytes(packet) for packet in [*codec.encode(frame), *codec.encode(None)])
