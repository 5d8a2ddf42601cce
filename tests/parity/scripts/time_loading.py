"""Seconds per sample of lerobot's own loader: raw frames and a window of actions, shuffled, with pyav.

`time_loading.py FOLDER` reads `options.json` there and writes `result.json`: wall seconds per sample of every repetition, after
the workers have delivered their first batches.
"""

import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import operators  # noqa: F401
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

folder = Path(sys.argv[1])
options = json.loads((folder / "options.json").read_text())
torch.set_num_threads(1)
windows = {"action": [step / options["fps"] for step in range(options["horizon"])]}
dataset = LeRobotDataset("me/dataset", root=options["root"], delta_timestamps=windows, video_backend="pyav")
loader = torch.utils.data.DataLoader(
    dataset,
    batch_size=options["batch"],
    shuffle=True,
    num_workers=options["workers"],
    persistent_workers=options["workers"] > 0,
    drop_last=True,
)
batches = (batch for _ in cycle([None]) for batch in loader)
for batch in islice(batches, options["warm_up"]):
    assert {key for key in batch if key.startswith("observation.images")} == set(dataset.meta.camera_keys)
result = []
for _ in range(options["repetitions"]):
    before = time.perf_counter()
    for batch in islice(batches, options["batches"]):
        assert batch["action"].shape[1] == options["horizon"]
    result.append((time.perf_counter() - before) / (options["batches"] * options["batch"]))
(folder / "result.json").write_text(json.dumps(result))
