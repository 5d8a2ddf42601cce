"""Decoders of videos: PyAV, and torchcodec where it is installed. The faster one on a dataset's own videos is used.

Both decode with FFmpeg and give the same frames up to the rounding of the conversion of colours. The choice is measured once
per dataset and machine, and kept in the user's cache folder, so that all ranks of a machine use the same decoder.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from contextlib import closing, suppress
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np

from benchbox.data.video.files import VideoReader, check_start
from benchbox.errors import ConfigurationError, Problem, reason_of
from benchbox.registry.names import did_you_mean
from benchbox.spec.datasets import is_camera
from benchbox.store.files import atomic_file
from benchbox.store.machine_cache import user_cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.data.format.metadata import DatasetMetadata
    from benchbox.data.video.files import FrameCounts
    from benchbox.data.video.torchcodec_reader import TorchcodecReader

AUTO, PYAV, TORCHCODEC = "auto", "pyav", "torchcodec"
DECODERS = (PYAV, TORCHCODEC)
_TIMED_FRAMES = 8  # in order, and as many in no order
_REPEATS = 3  # of which the fastest counts


class FrameReader(Protocol):
    """Reader of one video file."""

    path: Path
    start_s: float  # time of the first frame

    def frame_at(self, time_s: float) -> np.ndarray:
        """Return the frame shown at a time, within half a frame's duration: (H, W, 3) uint8 RGB."""

    def close(self) -> None: ...


def open_reader(decoder: str, path: Path, fps: float, counts: FrameCounts | None = None) -> FrameReader:
    """Open a video file with a decoder. PyAV adds to `counts`; torchcodec does not tell how many frames it decodes.

    Raises:
        DataError: the file is missing or damaged.
    """
    return reader_class(decoder)(path, fps, counts)


def reader_class(decoder: str) -> type[VideoReader | TorchcodecReader]:
    """Return the class of a decoder's readers."""
    if decoder == PYAV:
        return VideoReader
    from benchbox.data.video.torchcodec_reader import TorchcodecReader  # imports an extra

    return TorchcodecReader


def choose_decoder(metadata: DatasetMetadata, requested: str = AUTO) -> str:
    """Return the decoder of a dataset's videos: the requested one, or for `auto` the faster one that is installed.

    Raises:
        ConfigurationError: there is no such decoder, or it is not installed.
        DataError: the first video is missing or damaged.
    """
    if requested not in (AUTO, *DECODERS):
        raise ConfigurationError(Problem("", f"unknown decoder {requested!r}", did_you_mean(requested, (AUTO, *DECODERS))))
    if requested == TORCHCODEC and (reason := _why_not_torchcodec()):
        raise ConfigurationError(f"data: {{decoder: torchcodec}}: {reason}")
    if requested != AUTO:
        return requested
    spans = [item for episode in metadata.episodes[:1] for item in episode.videos.items()]
    videos = [span.path for name, span in spans if is_camera(metadata.features[name])]
    if not videos or _why_not_torchcodec():
        return PYAV
    cached = _cache_file(metadata)
    try:
        choice = json.loads(cached.read_text(encoding="utf-8"))["decoder"]
    except (OSError, ValueError, KeyError, TypeError):
        choice = None
    if choice in DECODERS:
        return str(choice)
    with suppress(OSError):
        cached.unlink(missing_ok=True)  # it is damaged
    times_s = {decoder: time_decoder(decoder, videos[0], metadata) for decoder in DECODERS}
    return _keep(cached, times_s)


def time_decoder(decoder: str, path: Path, metadata: DatasetMetadata) -> float:
    """Return the CPU time in seconds that a frame of the first episode takes, half of the frames read in order."""
    episode = metadata.episodes[0]
    (span, *_) = (span for span in episode.videos.values() if span.path == path)
    in_order = np.arange(min(episode.length, _TIMED_FRAMES))
    frames = [*in_order, *np.random.default_rng(0).integers(episode.length, size=len(in_order))]
    times_s = []
    for _ in range(_REPEATS):
        with closing(open_reader(decoder, path, metadata.fps)) as reader:
            check_start(path, reader.start_s, span.from_s, metadata.fps)
            reader.frame_at(span.from_s)  # the first frame pays for the set-up
            start_s = time.thread_time()
            for frame in frames:
                reader.frame_at(span.from_s + frame / metadata.fps)
            times_s.append((time.thread_time() - start_s) / len(frames))
    return min(times_s)


def _why_not_torchcodec() -> str | None:
    """Return why torchcodec cannot be used, None if it can."""
    if find_spec("torchcodec") is None:
        return "torchcodec is not installed: pip install 'benchbox[torchcodec]', and FFmpeg's shared libraries"
    try:
        import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as error:  # FFmpeg is missing, or it was built for another torch
        return f"torchcodec cannot be imported ({reason_of(error)}); it needs FFmpeg's shared libraries"
    return None


def _cache_file(metadata: DatasetMetadata) -> Path:
    versions = [f"{package} {version(package)}" for package in ("av", "torchcodec")]
    name = hashlib.sha256("\n".join([str(metadata.root.resolve()), platform.node(), *versions]).encode()).hexdigest()[:16]
    return user_cache() / "decoders" / f"{name}.json"


def _keep(path: Path, times_s: dict[str, float]) -> str:
    """Write the fastest decoder, and return it; or the one that another process wrote in the meantime."""
    fastest = min(times_s, key=lambda decoder: times_s[decoder])
    measured = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with atomic_file(measured) as stream:
            stream.write(json.dumps({"decoder": fastest, "cpu_s_per_frame": times_s}).encode())
        try:
            os.link(measured, path)
        except FileExistsError:
            fastest = json.loads(path.read_text(encoding="utf-8"))["decoder"]
        measured.unlink()
    except (OSError, ValueError, KeyError, TypeError):
        return fastest  # the cache cannot be written: every process measures
    return fastest


def installed_decoders() -> Sequence[str]:
    """Return the decoders that can be used here."""
    return [PYAV] if _why_not_torchcodec() else list(DECODERS)
