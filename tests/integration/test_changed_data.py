"""A training is not resumed on other data than it was trained on."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from benchbox.store.checkpoints import read_manifest
from benchbox.store.files import read_json, write_json
from tests.support.commands import run_in_process
from tests.support.datasets import write_robot

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: pi0
size: tiny
data: {{lerobot: {root}, validation: 0.4, workers: 0}}
backend: single
world_size: 1
batch: 2
steps: 2
log_every: 1
checkpoint: {{every: 2}}
"""


def test_an_episode_that_is_recorded_after_a_checkpoint_refuses_to_resume_from_it(tmp_path: Path) -> None:
    """Permutation and validation split would be others. One line, the records stay, and an old checkpoint resumes as before."""
    root, config, out = tmp_path / "robot", tmp_path / "train.yaml", tmp_path / "out"
    write_robot(root, cameras={"top": (16, 16)}, lengths=(4, 3, 5))
    config.write_text(TRAINING.format(root=root))
    trained = run_in_process("train", config, "--out", out)
    assert trained.returncode == 0, trained.stderr
    checkpoint, described = out / "checkpoints/step-00000002", read_json(out / "data.json")
    assert [(entry["dataset"], entry["episodes"]) for entry in read_manifest(checkpoint).data or ()] == [(str(root), 3)]
    shutil.rmtree(root)
    write_robot(root, cameras={"top": (16, 16)}, lengths=(4, 3, 5, 2))
    refused = run_in_process("train", config, "--out", out, "--resume", "--set", "steps=4")
    assert refused.returncode == 2
    (line,) = [line for line in refused.stderr.splitlines() if "other data" in line]
    assert f"{checkpoint}: other data: {root}: 3 episodes then, 4 now; resume with the data that it was trained on" in line
    assert read_json(out / "data.json") == described
    manifest = read_json(checkpoint / "checkpoint.json")
    del manifest["crc32"], manifest["data"]
    write_json(checkpoint / "checkpoint.json", manifest)
    resumed = run_in_process("train", config, "--out", out, "--resume", "--set", "steps=4")
    assert resumed.returncode == 0, resumed.stderr
    assert read_json(out / "data.json")["datasets"][0]["episodes"] == 4
