"""The files of a v3.0 dataset while they are written: many episodes a file, the next file once one is large enough."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchbox.data import statistics
from benchbox.data.metadata import V30_DATA, V30_VIDEO
from benchbox.data.video import VideoWriter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CHUNK_FILES = 1000  # files in a chunk folder
MIB = 2**20

ARROW_TYPES = {"float32": pa.float32(), "float64": pa.float64(), "int64": pa.int64(), "bool": pa.bool_()}


class DataFiles:
    """The Parquet tables of every frame's values, one row group an episode."""

    def __init__(self, root: Path, columns: Mapping[str, Mapping[str, Any]], limit_mib: float) -> None:
        self._root = root
        self._limit = limit_mib * MIB
        self._file = -1
        self._path = root
        self._writer: pq.ParquetWriter | None = None
        # one value is a plain column, several are a list of fixed length
        self._types = {
            name: ARROW_TYPES[column["dtype"]]
            if column["shape"][0] == 1
            else pa.list_(ARROW_TYPES[column["dtype"]], column["shape"][0])
            for name, column in columns.items()
        }

    def append(self, values: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Store an episode, (frames, D) by column; the columns of the episode table that say where it went."""
        if self._writer is None or self._path.stat().st_size >= self._limit:
            self.close()
            self._file += 1
            self._path = self._root / V30_DATA.format(**_place(self._file))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, pa.schema(list(self._types.items())))
        arrays = {}
        for name, kind in self._types.items():
            flat = pa.array(values[name].ravel())
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, type=kind) if pa.types.is_fixed_size_list(kind) else flat
        self._writer.write_table(pa.table(arrays, schema=pa.schema(list(self._types.items()))))
        return {f"data/{key}": value for key, value in _place(self._file).items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class CameraFiles:
    """One camera: frames of the running episode wait on disk uncompressed, so that the episode can still be discarded."""

    def __init__(self, root: Path, feature: str, *, shape: tuple[int, int, int], fps: int, limit_mib: float) -> None:
        self._root = root
        self._feature = feature
        self._shape = shape
        self._fps = fps
        self._limit = limit_mib * MIB
        self._file = -1
        self._writer: VideoWriter | None = None
        self._waiting = tempfile.TemporaryFile(dir=root)  # noqa: SIM115  # lives as long as the camera
        self.histogram = np.zeros((3, statistics.LEVELS), dtype=np.int64)  # of every frame stored

    def add(self, image: np.ndarray) -> None:
        """A frame of the running episode, (H, W, 3) uint8."""
        self._waiting.write(image.tobytes())

    def discard(self) -> None:
        """Forget the frames of the running episode."""
        self._waiting.seek(0)
        self._waiting.truncate()

    def end_episode(self) -> tuple[dict[str, Any], np.ndarray]:
        """Encode the running episode: its columns of the episode table, and the histogram of its pixels."""
        if self._writer is None or self._writer.encoded_bytes >= self._limit:
            self._close_video()
            self._file += 1
            path = self._root / V30_VIDEO.format(video_key=self._feature, **_place(self._file))
            self._writer = VideoWriter(path, fps=self._fps, height=self._shape[0], width=self._shape[1])
        counts = np.zeros_like(self.histogram)
        start_s = self._writer.time_s
        self._waiting.seek(0)
        first = True
        while pixels := self._waiting.read(int(np.prod(self._shape))):
            image = np.frombuffer(pixels, dtype=np.uint8).reshape(self._shape)
            counts += statistics.histogram(image)
            self._writer.add(image, key_frame=first)
            first = False
        self.discard()
        self.histogram += counts
        where = {**_place(self._file), "from_timestamp": start_s, "to_timestamp": self._writer.time_s}
        return {f"videos/{self._feature}/{key}": value for key, value in where.items()}, counts

    def close(self) -> None:
        """Finish the running file; frames that wait are dropped."""
        self._waiting.close()
        self._close_video()

    def _close_video(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _place(file: int) -> dict[str, int]:
    chunk, index = divmod(file, CHUNK_FILES)
    return {"chunk_index": chunk, "file_index": index}
