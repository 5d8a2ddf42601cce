"""Writer of LeRobot datasets, v3.0 or v2.1. A dataset appears under its name only when it is complete."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from benchbox.data.format import statistics
from benchbox.data.format.layouts import v2, v30
from benchbox.data.format.layouts.layout import FILES_PER_CHUNK, WrittenDataset, WrittenEpisode
from benchbox.data.writing.features import DEFAULT_FEATURES, describe_feature, validate_feature
from benchbox.data.writing.files import CameraFiles, EpisodeTables, TableFiles
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

DATA_FILE_MIB = 100
VIDEO_FILE_MIB = 200
LIMITS_MIB: dict[str, float] = {"data_files_size_in_mb": DATA_FILE_MIB, "video_files_size_in_mb": VIDEO_FILE_MIB}
LAYOUTS = {layout.version: layout for layout in (v30.LAYOUT, v2.LAYOUT)}


class LeRobotWriter:
    """Writer of a dataset, frame by frame: `add_frame` until `save_episode`, and `close` at the end.

    It writes into a hidden folder beside `root`, which `close` renames to `root`: an interrupted recording leaves no incomplete
    dataset. As a context manager it calls `close`, or `abort` if the block raises an exception.

    Args:
        features: those of LeRobot's info.json: name -> {"dtype", "shape", "names"}, with dtype float32, float64, int64 or bool
            and a shape of one dimension, or "video" and a shape (H, W, 3). Timestamps and indices are added by the writer.
        version: v3.0, or v2.1, which has files of its own for every episode.
        data_file_mib, video_file_mib: size at which the next file is begun where episodes share files.

    Raises:
        DataError: `root` exists, a feature cannot be stored, or a frame does not fit the features.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        fps: int,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str,
        version: str = v30.VERSION,
        data_file_mib: float = DATA_FILE_MIB,
        video_file_mib: float = VIDEO_FILE_MIB,
    ) -> None:
        self.root = Path(root)
        self.fps = fps
        self.robot_type = robot_type
        if self.root.exists():
            raise DataError(f"{self.root}: exists already; name another folder or remove it")
        self.features = {name: validate_feature(name, feature) for name, feature in features.items()}
        columns = {name: feature for name, feature in self.features.items() if feature["dtype"] != "video"} | DEFAULT_FEATURES
        self._layout = LAYOUTS[version]
        self._limits_mib = {"data_files_size_in_mb": data_file_mib, "video_files_size_in_mb": video_file_mib}
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []  # of the current episode
        self._values: dict[str, list[np.ndarray]] = {name: [] for name in columns}  # of all saved episodes
        self._episodes: list[WrittenEpisode] = []
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{self.root.name}.", dir=self.root.parent))
        self._tables, self._files = EpisodeTables(columns), TableFiles(self._folder, self._layout, data_file_mib)
        self._cameras = {
            name: CameraFiles(
                self._folder, name, shape=tuple(feature["shape"]), fps=fps, layout=self._layout, limit_mib=video_file_mib
            )
            for name, feature in self.features.items()
            if feature["dtype"] == "video"
        }

    @property
    def num_episodes(self) -> int:
        """Number of saved episodes."""
        return len(self._episodes)

    @property
    def num_frames(self) -> int:
        """Number of frames in the saved episodes."""
        return self._episodes[-1].from_index + self._episodes[-1].length if self._episodes else 0

    @property
    def histograms(self) -> dict[str, np.ndarray]:
        """Number of pixels of each value and channel (3, 256) in the saved episodes, by camera feature."""
        return {name: camera.histogram for name, camera in self._cameras.items()}

    def add_frame(self, frame: Mapping[str, Any], *, task: str) -> None:
        """Append a frame to the current episode: a value for every feature, images as (H, W, 3) uint8 RGB."""
        if frame.keys() != self.features.keys():
            mismatch = sorted(frame.keys() ^ self.features.keys())
            raise DataError(f"a frame must have exactly the features of the dataset; missing or unknown: {', '.join(mismatch)}")
        row: dict[str, Any] = {"task": task}
        for name, feature in self.features.items():
            value = np.asarray(frame[name])
            if value.shape != tuple(feature["shape"]):
                raise DataError(f"{name}: a value of shape {value.shape} for a feature of shape {tuple(feature['shape'])}")
            if name in self._cameras and value.dtype != np.uint8:
                raise DataError(f"{name}: images are uint8, not {value.dtype}")
            row[name] = value if name in self._cameras else value.astype(feature["dtype"])
        for name, camera in self._cameras.items():  # after all checks, so that a rejected frame is added to no camera
            camera.add(row.pop(name))
        self._rows.append(row)

    def save_episode(self) -> None:
        """Write the current episode to the dataset."""
        if not self._rows:
            raise DataError("an episode must have at least one frame")
        start, length = self.num_frames, len(self._rows)
        for row in self._rows:
            self._tasks.setdefault(row["task"], len(self._tasks))
        frame_index = np.arange(length)[:, None]
        values = {name: np.stack([row[name] for row in self._rows]) for name in self.features if name not in self._cameras}
        values |= {
            "timestamp": (frame_index / self.fps).astype(np.float32),
            "frame_index": frame_index,
            "episode_index": np.full((length, 1), self.num_episodes),
            "index": frame_index + start,
            "task_index": np.array([[self._tasks[row["task"]]] for row in self._rows]),
        }
        data_file = self._files.append(self._tables.build(values))
        stats = {name: statistics.feature_statistics(value) for name, value in values.items()}
        videos = {}
        for name, camera in self._cameras.items():
            videos[name], counts = camera.save_episode()
            stats[name] = statistics.image_statistics(counts, length)
        for name, value in values.items():
            self._values[name].append(value)
        episode = WrittenEpisode(
            index=self.num_episodes,
            tasks=tuple(dict.fromkeys(row["task"] for row in self._rows)),
            from_index=start,
            length=length,
            data_file=data_file,
            videos=videos,
            statistics=stats,
        )
        self._episodes.append(episode)
        self._rows.clear()

    def close(self) -> None:
        """Finish the files and rename the temporary folder to `root`."""
        try:
            if self._rows:
                raise DataError("the last episode was neither saved nor discarded")
            if not self._episodes:
                raise DataError(f"{self.root}: nothing was recorded")
            self._close_files()
            self._write_metadata()
            if self.root.exists():
                raise DataError(f"{self.root}: appeared while recording; nothing was overwritten")
            self._folder.chmod(0o755)  # a temporary folder is private
            self._folder.rename(self.root)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the temporary folder. Does nothing after `close`."""
        try:
            self._close_files()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _close_files(self) -> None:
        self._files.close()
        for camera in self._cameras.values():
            camera.close()

    def _write_metadata(self) -> None:
        stats = {name: statistics.feature_statistics(np.concatenate(values)) for name, values in self._values.items()}
        stats |= {
            name: statistics.image_statistics(camera.histogram, self.num_frames) for name, camera in self._cameras.items()
        }
        info = {
            "codebase_version": self._layout.version,
            "robot_type": self.robot_type,
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            "fps": self.fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": self._layout.data_path,
            "video_path": self._layout.video_path if self._cameras else None,
            "features": {
                name: describe_feature(feature, self.fps) for name, feature in (self.features | DEFAULT_FEATURES).items()
            },
        }
        dataset = WrittenDataset(
            info=info, tasks=list(self._tasks), episodes=self._episodes, statistics=stats, limits_mib=self._limits_mib
        )
        self._layout.write_metadata(self._folder, dataset)
