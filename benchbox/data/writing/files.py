"""Writers of the data and video files of a dataset: one file per episode, or shared ones up to a size limit."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchbox.data.format import statistics
from benchbox.data.format.layouts.layout import WrittenVideo
from benchbox.data.video.files import VideoWriter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchbox.data.format.layouts.layout import Layout

MIB = 2**20

ARROW_TYPES = {"float32": pa.float32(), "float64": pa.float64(), "int64": pa.int64(), "bool": pa.bool_()}


class TableFiles:
    """Writer of the Parquet data files, one row group per episode."""

    def __init__(self, root: Path, layout: Layout, limit_mib: float) -> None:
        self._root = root
        self._layout = layout
        self._limit_bytes = limit_mib * MIB if layout.shares_files else 0
        self._file_number = -1
        self._path = root
        self._writer: pq.ParquetWriter | None = None

    def append(self, rows: pa.Table) -> int:
        """Store the rows of an episode, and return the number of their file. All episodes have one schema."""
        if self._writer is None or self._path.stat().st_size >= self._limit_bytes:
            self.close()
            self._file_number += 1
            self._path = self._root / self._layout.data_path.format(**self._layout.file_names(self._file_number))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, rows.schema)
        self._writer.write_table(rows)
        return self._file_number

    def close(self) -> None:
        """Finish the current file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class EpisodeTables:
    """Tables of episodes from their values. Features of one value are plain columns, those of several lists of fixed length."""

    def __init__(self, columns: Mapping[str, Mapping[str, Any]]) -> None:
        self._types = {
            name: ARROW_TYPES[column["dtype"]]
            if column["shape"][0] == 1
            else pa.list_(ARROW_TYPES[column["dtype"]], column["shape"][0])
            for name, column in columns.items()
        }

    def build(self, values: Mapping[str, np.ndarray]) -> pa.Table:
        """Return the table of an episode from its values, (frames, D) by column."""
        arrays = {}
        for name, arrow_type in self._types.items():
            array = pa.array(values[name].ravel())
            is_list = pa.types.is_fixed_size_list(arrow_type)
            arrays[name] = pa.FixedSizeListArray.from_arrays(array, type=arrow_type) if is_list else array
        return pa.table(arrays, schema=pa.schema(list(self._types.items())))


class CameraFiles:
    """Writer of the videos of one camera.

    Frames of the current episode are stored uncompressed in a temporary file until its end, so that it can be discarded.
    """

    def __init__(
        self, root: Path, feature: str, *, shape: tuple[int, int, int], fps: int, layout: Layout, limit_mib: float
    ) -> None:
        self._root = root
        self._layout = layout
        self._feature = feature
        self._shape = shape
        self._fps = fps
        self._limit_bytes = limit_mib * MIB if layout.shares_files else 0
        self._file_number = -1
        self._writer: VideoWriter | None = None
        self._raw_frames = tempfile.TemporaryFile(dir=root)  # noqa: SIM115  # lives as long as this object
        self.histogram = np.zeros((3, statistics.LEVELS), dtype=np.int64)  # over all stored frames

    def add(self, image: np.ndarray) -> None:
        """Append a frame to the current episode, (H, W, 3) uint8."""
        self._raw_frames.write(image.tobytes())

    def save_episode(self) -> tuple[WrittenVideo, np.ndarray]:
        """Encode the current episode, and return its video and the histogram of its pixels."""
        if self._writer is None or self._writer.encoded_bytes >= self._limit_bytes:
            self._close_video()
            self._file_number += 1
            names = self._layout.file_names(self._file_number)
            path = self._root / self._layout.video_path.format(video_key=self._feature, **names)
            self._writer = VideoWriter(path, fps=self._fps, height=self._shape[0], width=self._shape[1])
        counts = np.zeros_like(self.histogram)
        start_s = self._writer.time_s
        self._raw_frames.seek(0)
        key_frame = True
        while pixels := self._raw_frames.read(int(np.prod(self._shape))):
            image = np.frombuffer(pixels, dtype=np.uint8).reshape(self._shape)
            counts += statistics.pixel_histogram(image)
            self._writer.add(image, key_frame=key_frame)
            key_frame = False
        self._raw_frames.seek(0)
        self._raw_frames.truncate()
        self.histogram += counts
        return WrittenVideo(self._file_number, start_s, self._writer.time_s), counts

    def close(self) -> None:
        """Finish the current file; frames of an unfinished episode are dropped."""
        self._raw_frames.close()
        self._close_video()

    def _close_video(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
