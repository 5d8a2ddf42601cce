"""Records a tiny dataset with lerobot: python lerobot_dataset.py FOLDER."""

import sys

import lerobot_train  # noqa: F401 (declares torchvision's operators)
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

features = {
    "observation.images.top": {"dtype": "image", "shape": (64, 64, 3), "names": ["height", "width", "channel"]},
    "observation.state": {"dtype": "float32", "shape": (4,), "names": None},
    "action": {"dtype": "float32", "shape": (4,), "names": None},
}
dataset = LeRobotDataset.create("corpus/tiny", fps=10, root=sys.argv[1], features=features, use_videos=False)
random = np.random.default_rng(0)
for _ in range(2):
    for _ in range(20):
        state = random.standard_normal(4).astype(np.float32)
        image = random.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        dataset.add_frame({"observation.images.top": image, "observation.state": state, "action": state, "task": "reach"})
    dataset.save_episode()
dataset.finalize()
