"""Reader of video files by torchcodec, an extra. It uses one thread, so that each loader worker uses one core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchcodec.decoders import VideoDecoder

from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from benchbox.data.video.files import FrameCounts


class TorchcodecReader:
    """Frames of one file by presentation time. torchcodec seeks only where that is shorter than decoding on."""

    def __init__(self, path: Path, fps: float, counts: FrameCounts | None = None) -> None:  # noqa: ARG002 (it tells no numbers)
        self.path = path
        self._period = 1 / fps
        if not path.is_file():
            raise DataError(f"{path}: the video is missing")
        try:
            self._decoder: Any = VideoDecoder(str(path), dimension_order="NHWC", num_ffmpeg_threads=1)
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{path}: not readable as video ({_reason(error)})") from None
        self.start_s = float(self._decoder.metadata.begin_stream_seconds or 0)

    def frame_at(self, time_s: float) -> np.ndarray:
        """Return the frame shown at that time, within half a frame's duration: (H, W, 3) uint8 RGB.

        Raises:
            DataError: the file has no such frame, or the frame cannot be decoded.
        """
        try:
            # A quarter of a period into the frame: times of tables are rounded to float32.
            frame = self._decoder.get_frame_played_at(time_s + self._period / 4)
        except IndexError:
            raise DataError(f"{self.path}: no frame at {time_s:.3f} s, which the table expects") from None
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{self.path}: cannot decode the frame at {time_s:.3f} s ({_reason(error)})") from None
        if abs(frame.pts_seconds - time_s) >= self._period / 2:
            raise DataError(f"{self.path}: no frame at {time_s:.3f} s, which the table expects")
        pixels: np.ndarray = frame.data.numpy()
        return pixels

    def close(self) -> None:
        """Release the file."""
        self._decoder = None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
