"""A training that is asked to stop saves a checkpoint after its step, and continues from there bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.store.checkpoints import list_checkpoints
from benchbox.store.events import read_events
from benchbox.trainer.gauges import MEASURED_FIELDS
from tests.support.checkpoints import checksums

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: value
size: tiny
data: synthetic
backend: ddp
world_size: 2
batch: 1
seed: 3
optim: {lr: 1.0e-3, warmup_steps: 2, total_steps: 8}
steps: 1000
log_every: 1
checkpoint: {every: 500}
"""
# The signal, and the process that gets it: the command, or a rank.
STOPS = [(signal.SIGTERM, None), (signal.SIGUSR1, None), (signal.SIGTERM, 1), (signal.SIGUSR1, 0)]


@dataclass(frozen=True)
class Stop:
    code: int
    stdout: str
    stderr: str
    steps: int  # that the newest checkpoint is after
    logged: int


def command(config: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "benchbox.cli.app", "train", str(config), "--out", str(out), *more]


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in MEASURED_FIELDS} for row in rows]


def stop(config: Path, out: Path, number: signal.Signals, rank: int | None) -> Stop:
    """Resume the training in a folder, and stop it once it has taken two more steps."""
    logged = len(metrics(out)) if out.exists() else 0
    process = subprocess.Popen(command(config, out, "--resume"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < logged + 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if rank is None:
        process.send_signal(number)
    else:
        (start, *_), _ = read_events(out / "launch" / f"events-rank{rank}.jsonl")
        os.kill(start["pid"], number)
    stdout, stderr = process.communicate(timeout=200)
    steps = int(list_checkpoints(out / "checkpoints")[-1].name.removeprefix("step-"))
    return Stop(process.returncode, stdout, stderr, steps, len(metrics(out)))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Stop]]:
    """The configuration and folder of one training that was stopped in four ways, each time resumed."""
    folder = tmp_path_factory.mktemp("stopped")
    config = folder / "train.yaml"
    config.write_text(TRAINING)
    return config, folder / "out", [stop(config, folder / "out", number, rank) for number, rank in STOPS]


@pytest.mark.parametrize("index", range(len(STOPS)), ids=[f"{number.name}-to-{rank}" for number, rank in STOPS])
def test_the_signal_saves_after_the_step_and_says_how_to_resume(stopped: tuple[Path, Path, list[Stop]], index: int) -> None:
    """The command or one rank gets the signal. The checkpoint is of the last step in the log: nothing is repeated."""
    result = stopped[2][index]
    assert result.code == 130, result.stderr
    assert result.steps == result.logged
    assert f"stopped: asked to stop, after step {result.steps}" in result.stderr
    assert "continue with --resume" in result.stderr
    by_command = STOPS[index][1] is None
    assert (f"{STOPS[index][0].name}: the training stops after this step" in result.stderr) == by_command


def test_the_resumed_training_prints_only_its_own_steps(stopped: tuple[Path, Path, list[Stop]]) -> None:
    before, after = stopped[2][:2]
    printed = [int(step) for step in re.findall(r"^step (\d+)/", after.stdout, flags=re.MULTILINE)]
    assert printed == list(range(before.steps + 1, after.steps + 1))


def test_a_training_that_was_stopped_four_times_equals_one_that_never_was(
    stopped: tuple[Path, Path, list[Stop]], tmp_path: Path
) -> None:
    """Losses, norms and rates of every step, and in the end the weights, masters, moments and generators of every rank."""
    config, out, stops = stopped
    sets = ["--set", f"steps={stops[-1].steps + 2}"]
    for folder, more in ((out, ["--resume"]), (tmp_path, [])):
        done = subprocess.run(command(config, folder, *more, *sets), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(tmp_path)
    resumed, straight = (list_checkpoints(folder / "checkpoints")[-1] for folder in (out, tmp_path))
    assert checksums(resumed) == checksums(straight)


def test_a_training_that_takes_no_steps_yet_ends_at_once(stopped: tuple[Path, Path, list[Stop]], tmp_path: Path) -> None:
    process = subprocess.Popen(command(stopped[0], tmp_path), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (tmp_path / "launch").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "stopped by the user before it ended; no checkpoint" in stderr
    assert not (tmp_path / "metrics.jsonl").exists()
