"""Datasets handed to other processes, and recordings in processes that are killed."""

import multiprocessing
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchbox.data import LeRobotWriter, open_dataset
from benchbox.errors import DataError
from tests.support.datasets import FEATURES
from tests.support.processes import minimal_environment


def _digests(ds, order):
    return [hash(ds.image("front", i).numpy().tobytes()) for i in order]


def _child_reads(ds, order, results):
    results.put(_digests(ds, order) == _digests(open_dataset(ds.root), order))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dataset_in_use_can_be_handed_to_another_process(tmp_path, method):
    """Parent and child read at once, from a file too large for either to have it in a buffer."""
    features = {name: FEATURES[name] for name in ("observation.state", "action")}
    features["observation.images.front"] = {"dtype": "video", "shape": [96, 96, 3], "names": None}
    rng = np.random.default_rng(0)
    with LeRobotWriter(tmp_path / "noise", fps=10, features=features, robot_type="test") as writer:
        for _ in range(60):
            image = rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)
            frame = {"observation.state": np.zeros(3), "action": np.zeros(2), "observation.images.front": image}
            writer.add_frame(frame, task="t")
        writer.save_episode()
    ds = open_dataset(tmp_path / "noise")
    ds.image("front", 3)
    order = random.Random(0).sample(range(60), 60)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_child_reads, args=(ds, order, results))
    child.start()
    digests = _digests(ds, order[::-1])
    assert results.get(timeout=60)
    child.join()
    assert digests == _digests(open_dataset(ds.root), order[::-1])


def test_a_killed_recording_leaves_no_dataset(tmp_path):
    code = """
import sys
from tests.support.datasets import FEATURES, blank_frame
from benchbox.data import LeRobotWriter
writer = LeRobotWriter(sys.argv[1], fps=10, features=FEATURES, robot_type="test")
while True:
    for _ in range(5):
        writer.add_frame(blank_frame(), task="t")
    writer.save_episode()
    print(writer.num_episodes, flush=True)
"""
    root = tmp_path / "new"
    command = [sys.executable, "-c", code, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=minimal_environment()) as child:
        assert child.stdout is not None
        while child.stdout.readline() != b"3\n":
            time.sleep(0)
        child.send_signal(signal.SIGKILL)
    assert not root.exists()
    with pytest.raises(DataError, match="no such dataset"):
        open_dataset(root)
