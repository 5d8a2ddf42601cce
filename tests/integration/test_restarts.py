"""`benchbox train --max-restarts`: the ranks start again from the last checkpoint after one of them died."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_in_process
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: gated
size: dropping
data: synthetic
backend: ddp
world_size: 2
batch: 2
optim: {lr: 1.0e-3, warmup_steps: 2, total_steps: 8}
steps: 12
log_every: 1
checkpoint: {every: 5, keep: 2}
"""

# Rank 0 waits before the step after the first checkpoint while `waiting` is there, so that the training has one checkpoint when
# it is disturbed: it is written in the background, which may take longer than the five steps to the next.
GATED = """

class Gated(Dropping):
    steps = 0

    def forward(self, batch, *, per_sample=False):
        import os, pathlib, time
        while os.environ["RANK"] == "0" and self.steps == 5 and pathlib.Path("waiting").exists():
            time.sleep(0.02)
        self.steps += 1
        return super().forward(batch, per_sample=per_sample)

def build(preset, axes):
    return Gated(preset["rate"])
"""
POLICY = Path(__file__).parent / "policies" / "dropout"


def train(folder: Path, name: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchbox.cli.app", "train", "t.yaml", "--policy-dir", "policies", "--out", name, *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(pattern: str, folder: Path) -> Path:
    deadline = time.monotonic() + 240
    while not (paths := sorted(folder.glob(pattern))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return paths[-1]


def kill_rank_1(folder: Path) -> None:
    """Kill it as a host without memory does, once there is a checkpoint to continue from."""
    wait_for("checkpoints/step-*", folder)
    first_line, *_ = (folder / "launch/events-rank1.jsonl").read_text().splitlines()
    os.kill(json.loads(first_line)["pid"], signal.SIGKILL)


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr", "samples")} for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training file, and the folder `straight` of its undisturbed training."""
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "t.yaml").write_text(TRAINING)
    (folder / "policies" / "gated").mkdir(parents=True)
    (folder / "policies" / "gated" / "policy.py").write_text((POLICY / "policy.py").read_text() + GATED)
    shutil.copy(POLICY / "presets.yaml", folder / "policies" / "gated")
    straight = run_in_process("train", "t.yaml", "--policy-dir", "policies", "--out", "straight", cwd=folder)
    assert straight.returncode == 0, straight.stderr
    return folder


@pytest.mark.parametrize("launcher", in_tiers(["local", "torchrun"], "local".__eq__))
def test_a_training_of_which_a_rank_was_killed_ends_with_the_metrics_of_the_undisturbed_one(
    launcher: str, folder: Path
) -> None:
    """Bit for bit, with a line that says what happened and from where it continued."""
    out = folder / launcher
    (folder / "waiting").touch()
    training = train(folder, launcher, "--max-restarts", "2", "--launcher", launcher)
    kill_rank_1(out)
    (folder / "waiting").unlink()
    _, stderr = training.communicate(timeout=300)
    assert training.returncode == 0, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("warning: rank 1: Killed: ended by SIGKILL from outside")
    (restart,) = json.loads((out / "restarts.json").read_text())["restarts"]
    assert line.endswith(f"; restart 1 of 2 from the checkpoint at step {restart['from_step']}")
    assert restart["from_step"] == 5
    events = [json.loads(line) for line in (out / "launch/events-rank0.jsonl").read_text().splitlines()]
    (steps,) = {event["of"] for event in events if event.get("stage") == "train"}
    assert steps == 12 - restart["from_step"], "it did not begin anew"
    assert metrics(out) == metrics(folder / "straight")
    assert (out / "launch-failed-1/rank1.log").exists()
