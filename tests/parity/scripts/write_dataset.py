"""Write a dataset whose frames encode their index, by lerobot: images in videos or, with `image` as options, in the tables."""

import inspect
import json
import sys
from pathlib import Path

import numpy as np
import operators  # noqa: F401
from lerobot.datasets.lerobot_dataset import LeRobotDataset

folder = Path(sys.argv[1])
options = json.loads((folder / "options.json").read_text())
names = ["height", "width", "channels"]
features = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    "observation.images.front": {"dtype": options["images"], "shape": (48, 64, 3), "names": names},
}
dataset = LeRobotDataset.create(
    "me/dataset", fps=10, features=features, root=folder / "dataset", use_videos=options["images"] == "video"
)
random = np.random.default_rng(0)
index = 0
for length, task in options["episodes"]:
    for _ in range(length):
        bars = np.repeat(np.array([(index >> bit) & 1 for bit in range(8)], dtype=np.uint8) * 255, 8)
        frame = {
            "observation.state": random.normal(size=3).astype(np.float32),
            "action": np.array([index, -index], dtype=np.float32) / 10,
            "observation.images.front": np.broadcast_to(bars[None, :, None], (48, 64, 3)).copy(),
        }
        if "task" in inspect.signature(dataset.add_frame).parameters:  # until 0.3.3
            dataset.add_frame(frame, task=task)
        else:
            dataset.add_frame(frame | {"task": task})
        index += 1
    dataset.save_episode()
if hasattr(dataset, "finalize"):
    dataset.finalize()
