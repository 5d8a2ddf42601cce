"""Time lerobot's own loader: raw frames by pyav and a window of actions, shuffled.

`time_loading.py FOLDER` reads `options.json` there. For every line on its standard input it prints the seconds per sample of
the next batches, so that the caller can measure in turns. Its workers live on between them.
"""

import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import operators  # noqa: F401
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

options = json.loads((Path(sys.argv[1]) / "options.json").read_text())
torch.set_num_threads(1)
windows = {"action": [step / options["fps"] for step in range(options["horizon"])]}
dataset = LeRobotDataset("me/dataset", root=options["root"], delta_timestamps=windows, video_backend="pyav")
workers = options["workers"]
loader = torch.utils.data.DataLoader(
    dataset, batch_size=options["batch"], shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
)
batches = (batch for _ in cycle([None]) for batch in loader)
for _ in sys.stdin:
    for batch in islice(batches, 2 * workers + 1):  # those that were loaded while nobody measured
        assert set(dataset.meta.camera_keys) <= set(batch)
        assert batch["action"].shape[:2] == (options["batch"], options["horizon"])
    before = time.perf_counter()
    for _ in islice(batches, options["batches"]):
        pass
    print((time.perf_counter() - before) / (options["batches"] * options["batch"]), flush=True)
