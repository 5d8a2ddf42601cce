"""A training goes on when what follows a complete checkpoint fails, and ends with the rank that could not write one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchbox.store.events import read_events
from tests.support.commands import run_in_process

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: pi0
size: tiny
data: synthetic
backend: single
world_size: 1
batch: 1
steps: 3
log_every: 1
checkpoint: {every: 1, keep: 1, background: false}
"""


def test_a_link_that_cannot_be_made_is_a_warning_of_the_training_which_ends_ok(tmp_path: Path) -> None:
    """The warning of the last checkpoint, after which no row is written, is in the log of the rank."""
    config, out = tmp_path / "train.yaml", tmp_path / "out"
    config.write_text(TRAINING)
    (out / "checkpoints/.latest/file").mkdir(parents=True)  # in the place of the link that is made first
    done = run_in_process("train", config, "--out", out)
    assert done.returncode == 0, done.stderr
    warnings = [json.loads(line).get("warning") for line in (out / "metrics.jsonl").read_text().splitlines()]
    link = f"{out / 'checkpoints/latest'}: the link could not be replaced (Is a directory); the newest checkpoint is"
    assert warnings == [None, f"{link} step-00000001", f"{link} step-00000002"]
    assert f"warning: {link} step-00000001" in done.stderr
    assert any(f"warning: {link} step-00000003" in log.read_text() for log in (out / "launch").rglob("*.log"))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [".latest", "step-00000003"]


# Appended to a policy of two layers: files of rank 1 cannot become as large as its part of the checkpoint, as on a full disk.
LIMITED = """
import os, resource

def build(preset, axes):
    if os.environ.get("RANK") == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    policy = Dropping(preset["rate"])
    policy.first, policy.second = Layer(STATE, 8192), Layer(8192, ACTION)
    return policy
"""


def test_a_checkpoint_that_a_rank_cannot_write_ends_the_training_with_that_rank_whichever_reports_it(tmp_path: Path) -> None:
    """All ranks raise the error, and each of them may be the first to do so."""
    policy, config = tmp_path / "policies/limited", tmp_path / "train.yaml"
    shutil.copytree(Path(__file__).parents[1] / "policies/dropout", policy)
    with (policy / "policy.py").open("a") as file:
        file.write(LIMITED)
    changes = {"pi0": "limited\nrecipe: fp32", "tiny": "honest", "single": "fsdp2", "world_size: 1": "world_size: 2"}
    text = TRAINING
    for old, new in changes.items():
        text = text.replace(old, new)
    config.write_text(text)
    done = run_in_process("train", config, "--policy-dir", tmp_path / "policies", "--out", tmp_path / "out")
    line = "error: crash: CheckpointError: the checkpoint could not be written on rank 1: OSError: [Errno 27] File too large"
    assert done.stderr.splitlines()[-2].startswith(f"{line} (rank 1, outside a step); no checkpoint")
    assert done.returncode == 3
    events = [event for rank in range(2) for event in read_events(tmp_path / f"out/launch/events-rank{rank}.jsonl")[0]]
    assert {event["rank"] for event in events if event["event"] == "error"} == {1}
