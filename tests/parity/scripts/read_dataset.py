"""Read all windows of a dataset by lerobot: states of the last step and this one, actions of this step and the next three."""

import json
import sys
from pathlib import Path

import numpy as np
import operators  # noqa: F401
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from safetensors.torch import save_file

folder = Path(sys.argv[1])
options = json.loads((folder / "options.json").read_text())
period = 1 / options["fps"]
windows = {"observation.state": [-period, 0.0], "action": [step * period for step in range(4)]}
dataset = LeRobotDataset("me/dataset", root=folder / "dataset", delta_timestamps=windows, video_backend="pyav")
if not options["decode"]:  # torchvision has no reader by PyAV any more
    dataset._query_videos = lambda *_: {}
rows = [dataset[index] for index in range(len(dataset))]
tensors = {
    name: torch.stack([row[name] for row in rows]).contiguous() for name, value in rows[0].items() if torch.is_tensor(value)
}
save_file(tensors, folder / "frames.safetensors")
statistics = {
    name: {key: np.asarray(value).tolist() for key, value in values.items()} for name, values in dataset.meta.stats.items()
}
content = {"tasks": [row["task"] for row in rows], "statistics": statistics, "episodes": dataset.num_episodes}
(folder / "content.json").write_text(json.dumps(content))
