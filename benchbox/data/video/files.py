"""Readers and writers of video files. They use one thread, so that each loader worker uses one core."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import av
from av.video.reformatter import VideoReformatter

from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np

    from benchbox.data.video.decoders import FrameReader

CODEC = "libx264"
CODEC_NAME = "h264"
PIXEL_FORMAT = "yuv420p"
GOP = 8  # frames between key frames: the number of frames to decode for random access to one of them
MAX_DECODE_AHEAD = 12  # frames: up to this distance forwards, decoding is cheaper than a seek
MAX_OPEN_VIDEOS = 32
MAX_INSPECTED_PACKETS = 5000
# PyAV 15 and 16 convert pixels in the calling thread. PyAV 17 uses every core without this argument, which is new in it.
_ONE_THREAD = {"threads": 1} if int(av.__version__.partition(".")[0]) >= 17 else {}


@dataclass(slots=True)
class FrameCounts:
    """Frames that were decoded, and those of them that were asked for."""

    decoded: int = 0
    used: int = 0


# PyAV before 19 raises UnicodeDecodeError for metadata that is not UTF-8, unless it is told what to do.
_LENIENT = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}


def open_video(path: Path) -> Any:
    """Open a video file for reading: a container with a video stream.

    Raises:
        DataError: the file is missing, is no video, or has no video stream.
    """
    try:
        container = av.open(str(path), **_LENIENT)
    except FileNotFoundError:
        raise DataError(f"{path}: the video is missing") from None
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"{path}: not readable as video ({error})") from None
    if not container.streams.video:
        container.close()
        raise DataError(f"{path}: no video stream in the file")
    return container


def start_time_s(stream: Any) -> float:
    """Return the presentation time of the first frame of a video stream."""
    return float((stream.start_time or 0) * stream.time_base)


def check_start(path: Path, start_s: float, first_s: float, fps: float) -> None:
    """Check that a video does not begin after the first frame that the dataset expects in it.

    The times of its further frames would be those of earlier ones, and nothing else would show it. lerobot refuses the frames
    before the start, with every decoder.

    Raises:
        DataError: it begins later.
    """
    if start_s - first_s >= 0.5 / fps:
        raise DataError(
            f"{path}: the video begins at {start_s:.3f} s, and its first frame in the dataset is at {first_s:.3f} s: all "
            "frames would be shifted; encode the video again with the first frame at that time"
        )


class VideoReader:
    """Frames of one file by presentation time. Reading forwards decodes every frame once."""

    def __init__(self, path: Path, fps: float, counts: FrameCounts | None = None) -> None:
        self.path = path
        self.counts = counts or FrameCounts()
        self._period = 1 / fps
        self._container = open_video(path)
        self._stream = self._container.streams.video[0]
        self._stream.thread_type = "NONE"
        self.start_s = start_time_s(self._stream)
        self._frames: Iterator[Any] = self._container.decode(self._stream)
        self._to_rgb = VideoReformatter()  # shared by all frames: its set-up takes longer than its use
        self._current: tuple[float, np.ndarray] | None = None  # time and pixels of the most recently decoded frame

    def frame_at(self, time_s: float) -> np.ndarray:
        """Return the frame shown at that time, within half a frame's duration: (H, W, 3) uint8 RGB.

        Raises:
            DataError: the file has no such frame, or the frame cannot be decoded.
        """
        if self._current is not None and abs(self._current[0] - time_s) < self._period / 2:
            return self._current[1]
        is_near_ahead = self._current is not None and 0 < time_s - self._current[0] < MAX_DECODE_AHEAD * self._period
        try:
            # A seek may land too late in files with reordered frames; then decode from the start of the file.
            for start_s in (None, time_s, 0.0) if is_near_ahead else (time_s, 0.0):
                if start_s is not None:
                    self._container.seek(round(start_s / self._stream.time_base), stream=self._stream)
                    self._frames = self._container.decode(self._stream)
                self._current = self._decode_to(time_s)
                if self._current is not None:
                    self.counts.used += 1
                    return self._current[1]
        except (av.FFmpegError, OSError) as error:
            self._current = None
            raise DataError(f"{self.path}: cannot decode the frame at {time_s:.3f} s ({error})") from None
        raise DataError(f"{self.path}: no frame at {time_s:.3f} s, which the table expects")

    def _decode_to(self, time_s: float) -> tuple[float, np.ndarray] | None:
        for frame in self._frames:
            self.counts.decoded += 1
            if frame.time is not None and frame.time > time_s - self._period / 2:
                if frame.time >= time_s + self._period / 2:
                    return None
                return frame.time, self._to_rgb.reformat(frame, format="rgb24", **_ONE_THREAD).to_ndarray()
        return None

    def close(self) -> None:
        self._container.close()


def key_frame_interval(path: Path) -> int | None:
    """Return the largest distance of key frames in the first minutes of a video file, None if there is only one.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        with open_video(path) as container:
            packets = islice(container.demux(video=0), MAX_INSPECTED_PACKETS)
            keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"{path}: not readable as video ({error})") from None
    return max((later - earlier for earlier, later in pairwise(keys)), default=None)


class VideoCache:
    """Most recently used video files of a dataset, opened on first use.

    A forked process opens files anew: those of its parent share their position with the parent.

    Args:
        first_time_s: function that returns the time of the first frame of the dataset in a file.
    """

    def __init__(
        self,
        fps: float,
        open_reader: Callable[[Path, float, FrameCounts], FrameReader] = VideoReader,
        first_time_s: Callable[[Path], float] = lambda _: 0.0,
    ) -> None:
        self._fps = fps
        self._open_reader = open_reader
        self._first_time_s = first_time_s
        self._pid = os.getpid()
        self.counts = FrameCounts()
        self._readers: OrderedDict[Path, FrameReader] = OrderedDict()
        self._last: FrameReader | None = None

    def open(self, path: Path) -> FrameReader:
        """Return the reader of a file.

        Raises:
            DataError: the file is missing or damaged, or begins after its first frame in the dataset.
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._readers = OrderedDict()
            self._last = None
        if self._last is not None and path is self._last.path:  # comparing paths takes as long as finding a frame
            return self._last
        if path not in self._readers:
            reader = self._open_reader(path, self._fps, self.counts)
            if reader.start_s > 0:  # rare, and the first time is searched in all episodes
                try:
                    check_start(path, reader.start_s, self._first_time_s(path), self._fps)
                except DataError:
                    reader.close()
                    raise
            self._readers[path] = reader
        self._readers.move_to_end(path)
        while len(self._readers) > MAX_OPEN_VIDEOS:
            self._readers.popitem(last=False)[1].close()
        self._last = self._readers[path]
        return self._last


class VideoWriter:
    """Writer of an H.264 file in MP4. Frame k is shown at k / fps."""

    def __init__(self, path: Path, *, fps: int, height: int, width: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.fps = fps
        self.frames = 0
        self.encoded_bytes = 0  # without the frames that the encoder still buffers
        self._container = av.open(str(path), mode="w")
        options = {"crf": "23", "preset": "medium", "g": str(GOP), "bf": "0", "threads": "1"}
        self._stream = self._container.add_stream(CODEC, rate=Fraction(fps), options=options)
        self._stream.width, self._stream.height = width, height
        self._stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else PIXEL_FORMAT  # which has one colour for 2 x 2 pixels

    def add(self, image: np.ndarray, *, key_frame: bool) -> None:
        """Append a frame, (H, W, 3) uint8 RGB."""
        frame = av.VideoFrame.from_ndarray(image, format="rgb24")
        frame.pts = self.frames
        frame.time_base = Fraction(1, self.fps)
        if key_frame:
            frame.pict_type = av.video.frame.PictureType.I
        self._encode(frame)
        self.frames += 1

    @property
    def time_s(self) -> float:
        """Presentation time of the next frame."""
        return self.frames / self.fps

    def close(self) -> None:
        self._encode(None)
        self._container.close()

    def _encode(self, frame: av.VideoFrame | None) -> None:
        packets = self._stream.encode(frame)
        self.encoded_bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)
