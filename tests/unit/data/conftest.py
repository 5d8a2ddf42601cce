from pathlib import Path

import numpy as np
import pytest
import torch

from benchbox.data import LeRobotWriter
from benchbox.registry.contracts import BatchSpec


@pytest.fixture
def spec() -> BatchSpec:
    return BatchSpec(
        cameras=2,
        image_size=(16, 20),
        state_dim=8,
        action_dim=6,
        horizon=5,
        history=3,
        prompt_tokens=96,
        text_vocab=300,
        state_in_prompt=True,
        response_tokens=4,
        fast_tokens=12,
        fast_vocab=256,
        uniforms=2,
    )


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
            writer.end_episode()
    return root


@pytest.fixture(scope="session")
def dataset_root(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "bars")
