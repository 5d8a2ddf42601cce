"""Small datasets whose images encode the index of their frame, and modified copies of them."""

import io
import json
import shutil
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from benchbox.data import LeRobotWriter
from benchbox.data.video.files import VideoWriter
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "observation.images.front": {"dtype": "video", "shape": [32, 48, 3], "names": ["height", "width", "channels"]},
    "observation.images.wrist": {"dtype": "video", "shape": [24, 24, 3], "names": ["height", "width", "channels"]},
}
LENGTHS = (13, 1, 20)
TASKS = ("push the red block", "open the drawer", "push the red block")


def draw_index(index: int, height: int, width: int) -> np.ndarray:
    """Return an image (H, W, 3) that encodes the index of a frame as eight bars, black or white."""
    bits = [(index >> bit) & 1 for bit in range(8)]
    bars = np.repeat(np.array(bits, dtype=np.uint8) * 255, width // 8)
    return np.broadcast_to(bars[None, :, None], (height, width, 3)).copy()


def read_index(image: torch.Tensor) -> int:
    """Return the index that `draw_index` encoded in an image (3, H, W)."""
    width = image.shape[2] // 8
    middles = image.float().mean((0, 1))[width // 2 :: width]
    return sum(int(level > 127) << bit for bit, level in enumerate(middles))


def encode_image(image: np.ndarray, codec: str = "png") -> bytes:
    """Return an image (H, W, 3) as PNG, or as JPEG by the codec mjpeg."""
    file = io.BytesIO()
    with av.open(file, "w", format="image2pipe") as container:
        stream = container.add_stream(codec, rate=1)
        stream.height, stream.width = image.shape[:2]
        stream.pix_fmt = "rgb24" if codec == "png" else "yuvj444p"
        for packet in (*stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")), *stream.encode(None)):
            container.mux(packet)
    return file.getvalue()


def blank_frame() -> dict[str, np.ndarray]:
    """Return zeros for every feature."""
    return {name: np.zeros(f["shape"], np.uint8 if f["dtype"] == "video" else np.float32) for name, f in FEATURES.items()}


def write_dataset(root, lengths=LENGTHS, tasks=TASKS, **options) -> Path:
    """Write a dataset of random states whose images and actions encode the index of their frame over all episodes."""
    rng = np.random.default_rng(0)
    index = 0
    with LeRobotWriter(root, fps=10, features=FEATURES, robot_type="test", **options) as writer:
        for length, task in zip(lengths, tasks, strict=True):
            for _ in range(length):
                frame = {
                    "observation.state": rng.normal(size=3),
                    "action": np.array([index, -index]) / 10,
                    "observation.images.front": draw_index(index, 32, 48),
                    "observation.images.wrist": draw_index(index, 24, 24),
                }
                writer.add_frame(frame, task=task)
                index += 1
            writer.save_episode()
    return root


def write_robot(root, *, cameras, state=3, action=2, fps=10, lengths=LENGTHS, level=0, scale=1.0, robot="test") -> Path:
    """Write a dataset of a robot with these cameras, (height, width) by name, and sizes of state and action.

    Images are of one grey `level`. The action of frame i of an episode is `scale` * i in every dimension; states are likewise.
    """
    features = {
        "observation.state": {"dtype": "float32", "shape": [state], "names": None},
        "action": {"dtype": "float32", "shape": [action], "names": None},
    }
    for name, size in cameras.items():
        features[f"observation.images.{name}"] = {"dtype": "video", "shape": [*size, 3], "names": None}
    with LeRobotWriter(root, fps=fps, features=features, robot_type=robot) as writer:
        for length in lengths:
            for index in range(length):
                images = {f"observation.images.{name}": np.full((*size, 3), level, np.uint8) for name, size in cameras.items()}
                numbers = {
                    "observation.state": np.full(state, scale * index),
                    "action": np.full(action, scale * index) * (1 + np.arange(action)),
                }
                writer.add_frame(numbers | images, task=f"task of {robot}")
            writer.save_episode()
    return root


def write_unequal_robots(folder: Path) -> DataSpec:
    """Write a robot with one camera and a short task, and one drawn less often, with two cameras and a task of 60 letters."""
    paths = [
        write_robot(folder / "short", cameras={"front": (16, 20)}, robot="a"),
        write_robot(folder / "long", cameras={"front": (16, 20), "wrist": (16, 20)}, robot="b" * 50),
    ]
    weighted = zip(paths, (3.0, 1.0), strict=True)
    datasets = tuple(DatasetSpec(path=str(path), weight=weight) for path, weight in weighted)
    return DataSpec(kind="lerobot", datasets=datasets, workers=0)


def annotate(root: Path, to: Path, columns: dict[str, list], subtasks: tuple[str, ...] = ()) -> Path:
    """Copy a dataset and add columns, a text or number per frame, and a table of subtasks in the format of LeRobot 0.4.4."""
    shutil.copytree(root, to)
    (file,) = (to / "data").rglob("*.parquet")
    table = pq.read_table(file)
    info = json.loads((to / "meta/info.json").read_text())
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
        info["features"][name] = {"dtype": "string" if isinstance(values[0], str) else "int64", "shape": [1], "names": None}
    pq.write_table(table, file)
    (to / "meta/info.json").write_text(json.dumps(info))
    if subtasks:
        index = pd.Index(list(subtasks), name="subtask")
        pd.DataFrame({"subtask_index": range(len(subtasks))}, index=index).to_parquet(to / "meta/subtasks.parquet")
    return to


def add_language(root: Path, to: Path, persistent: list[list[dict]], events: dict[int, list[dict]]) -> Path:
    """Copy a dataset and add the columns of LeRobot 0.6: rows of every episode, and rows by the index of their frame.

    As lerobot's writer, it infers the types of the columns and writes a row group per episode.
    """
    shutil.copytree(root, to)
    (file,) = (to / "data").rglob("*.parquet")
    table = pq.read_table(file)
    columns = {
        "language_persistent": [persistent[episode] for episode in table["episode_index"].to_pylist()],
        "language_events": [events.get(frame, []) for frame in range(len(table))],
    }
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    with pq.ParquetWriter(file, table.schema) as writer:
        for episode in range(len(persistent)):
            writer.write_table(table.filter(pc.equal(table["episode_index"], episode)))
    info = json.loads((to / "meta/info.json").read_text())
    info["features"] |= {name: {"dtype": "language", "shape": [1], "names": None} for name in columns}
    (to / "meta/info.json").write_text(json.dumps(info))
    return to


def copy_with_short_video(root: Path, to: Path) -> Path:
    """Copy a dataset of `write_dataset`, with a front camera that stops five frames before the table does."""
    shutil.copytree(root, to)
    writer = VideoWriter(to / "videos/observation.images.front/chunk-000/file-000.mp4", fps=10, height=32, width=48)
    for index in range(sum(LENGTHS) - 5):
        writer.add(np.ascontiguousarray(draw_index(index, 32, 48)), key_frame=index == 0)
    writer.close()
    return to


def split_data(root: Path, to: Path, files: dict[int, tuple[int, ...]], listed: tuple[int, ...]) -> Path:
    """Copy a v3.0 dataset of one data file with its rows in several files, and list every episode under a file of `listed`.

    Args:
        files: the episodes in a data file, by its number.
        listed: number of the data file of every episode in the table of episodes.
    """
    shutil.copytree(root, to)
    whole = to / "data/chunk-000/file-000.parquet"
    rows = pq.read_table(whole)
    whole.unlink()
    for number, episodes in files.items():
        part = rows.filter(pc.is_in(rows["episode_index"], pa.array(episodes)))
        pq.write_table(part, whole.with_name(f"file-{number:03d}.parquet"))
    path = to / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    column = table.column_names.index("data/file_index")
    pq.write_table(table.set_column(column, "data/file_index", pa.array(listed)), path)
    return to
