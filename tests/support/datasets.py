"""A small dataset whose frames say which frame they are, and what LeRobot may add to one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchbox.data import LeRobotWriter

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "observation.images.front": {"dtype": "video", "shape": [32, 48, 3], "names": ["height", "width", "channels"]},
    "observation.images.wrist": {"dtype": "video", "shape": [24, 24, 3], "names": ["height", "width", "channels"]},
}
LENGTHS = (13, 1, 20)
TASKS = ("push the red block", "open the drawer", "push the red block")


def burn(index: int, height: int, width: int) -> np.ndarray:
    """An image that says which frame it is: eight bars, black or white, the bits of its index."""
    bits = [(index >> bit) & 1 for bit in range(8)]
    bars = np.repeat(np.array(bits, dtype=np.uint8) * 255, width // 8)
    return np.broadcast_to(bars[None, :, None], (height, width, 3)).copy()


def read_back(image: torch.Tensor) -> int:
    """The index `burn` wrote into it; (3, H, W)."""
    width = image.shape[2] // 8
    middles = image.float().mean((0, 1))[width // 2 :: width]
    return sum(int(level > 127) << bit for bit, level in enumerate(middles))


def blank_frame() -> dict[str, np.ndarray]:
    """Zeros for every feature."""
    return {name: np.zeros(f["shape"], np.uint8 if f["dtype"] == "video" else np.float32) for name, f in FEATURES.items()}


def write_dataset(root, lengths=LENGTHS, tasks=TASKS, **options) -> Path:
    """A dataset of random numbers whose frames carry their own index over the whole dataset."""
    rng = np.random.default_rng(0)
    index = 0
    with LeRobotWriter(root, fps=10, features=FEATURES, robot_type="test", **options) as writer:
        for length, task in zip(lengths, tasks, strict=True):
            for _ in range(length):
                frame = {
                    "observation.state": rng.normal(size=3),
                    "action": np.array([index, -index]) / 10,
                    "observation.images.front": burn(index, 32, 48),
                    "observation.images.wrist": burn(index, 24, 24),
                }
                writer.add_frame(frame, task=task)
                index += 1
            writer.save_episode()
    return root


def annotated(root: Path, to: Path, columns: dict[str, list], subtasks: tuple[str, ...] = ()) -> Path:
    """A copy with further columns, text or numbers, one value a frame, and the table of subtasks as LeRobot 0.4.4 writes it."""
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
