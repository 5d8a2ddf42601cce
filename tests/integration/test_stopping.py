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

import psutil
import pytest

from benchbox.store.checkpoints import list_checkpoints, read_manifest
from benchbox.store.events import read_events
from tests.support.checkpoints import checksums
from tests.support.commands import run_in_process
from tests.support.datasets import write_robot
from tests.support.metrics_rows import without_measurements
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: value
size: tiny
data: synthetic
backend: {backend}
world_size: 2
batch: 1
seed: 3
optim: {{lr: 1.0e-3, warmup_steps: 2, total_steps: 8}}
steps: 1000
log_every: 1
checkpoint: {{every: 500}}
"""
ALL = -1  # as a batch system does that signals every process of a job
# By backend, the signals and the processes that get them: the command, a rank, or all there are.
STOPS: dict[str, list[tuple[signal.Signals, int | None]]] = {
    "ddp": [(signal.SIGINT, None), (signal.SIGUSR1, None), (signal.SIGTERM, 1), (signal.SIGUSR1, ALL), (signal.SIGTERM, ALL)],
    "zero2": [(signal.SIGTERM, None), (signal.SIGUSR1, 0)],
}
DEFAULT_BACKENDS = ("ddp",)
STOP_IDS = [
    f"{backend}-{number.name}-to-{'all' if rank == ALL else rank}" for backend, stops in STOPS.items() for number, rank in stops
]


@dataclass(frozen=True)
class Stop:
    """A training that was stopped."""

    by_command: bool
    number: signal.Signals
    code: int
    stdout: str
    stderr: str
    steps: int  # that the newest checkpoint is after
    logged: int


def command(config: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "benchbox.cli.app", "train", str(config), "--out", str(out), *more]


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return without_measurements(rows)


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
    elif rank == ALL:
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            each.send_signal(number)
    else:
        (start, *_), _ = read_events(out / "launch" / f"events-rank{rank}.jsonl")
        os.kill(start["pid"], number)
    stdout, stderr = process.communicate(timeout=200)
    steps = int(list_checkpoints(out / "checkpoints")[-1].name.removeprefix("step-"))
    return Stop(rank in (None, ALL), number, process.returncode, stdout, stderr, steps, len(metrics(out)))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[str, tuple[Path, list[Stop]]]:
    """Folder and stops of the training of each backend, which was stopped in several ways and resumed in between.

    The folder has the configuration in `train.yaml`, and the training in `out`.
    """
    trainings = {}
    for backend, stops in STOPS.items():
        if not exhaustive and backend not in DEFAULT_BACKENDS:
            continue
        folder = tmp_path_factory.mktemp(backend)
        config = folder / "train.yaml"
        config.write_text(TRAINING.format(backend=backend))
        trainings[backend] = folder, [stop(config, folder / "out", number, rank) for number, rank in stops]
    return trainings


@pytest.mark.parametrize(
    "index", in_tiers(range(len(STOP_IDS)), lambda index: STOP_IDS[index].startswith(DEFAULT_BACKENDS)), ids=STOP_IDS
)
def test_the_signal_saves_after_the_step_and_says_how_to_resume(
    stopped: dict[str, tuple[Path, list[Stop]]], index: int
) -> None:
    """The command or one rank gets the signal. The checkpoint is of the last step in the log: nothing is repeated."""
    result = [stop for _, stops in stopped.values() for stop in stops][index]
    assert result.code == 130, result.stderr
    assert result.steps == result.logged
    assert f"stopped: asked to stop, after step {result.steps}" in result.stderr
    assert "continue with --resume" in result.stderr
    assert (f"{result.number.name}: the training stops after this step" in result.stderr) == result.by_command


def test_the_resumed_training_prints_only_its_own_steps(stopped: dict[str, tuple[Path, list[Stop]]]) -> None:
    before, after = stopped["ddp"][1][:2]
    printed = [int(step) for step in re.findall(r"^step (\d+)/", after.stdout, flags=re.MULTILINE)]
    assert printed == list(range(before.steps + 1, after.steps + 1))


@pytest.mark.parametrize("backend", in_tiers(STOPS, DEFAULT_BACKENDS.__contains__))
def test_a_training_that_was_stopped_and_resumed_equals_one_that_never_was(
    stopped: dict[str, tuple[Path, list[Stop]]], tmp_path: Path, backend: str
) -> None:
    """Losses, norms and rates of every step, and at the last stop the weights, masters, moments and generators."""
    folder, stops = stopped[backend]
    done = run_in_process("train", folder / "train.yaml", "--out", tmp_path, "--set", f"steps={stops[-1].steps}")
    assert done.returncode == 0, done.stderr
    assert metrics(folder / "out") == metrics(tmp_path)
    ours, theirs = (list_checkpoints(path / "checkpoints")[-1] for path in (folder / "out", tmp_path))
    assert checksums(ours) == checksums(theirs)


def test_a_training_that_takes_no_steps_yet_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(TRAINING.format(backend="ddp"))
    process = subprocess.Popen(command(tmp_path / "train.yaml", tmp_path), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (tmp_path / "launch").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "stopped by the user before it ended; no checkpoint" in stderr
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("steps", "returncode", "line"),
    [
        (1000, 130, "stopped: "),
        (1, 0, "warning: the training was asked to stop, and has no validation after its last step: benchbox validate"),
    ],
)
def test_a_signal_during_a_validation_saves_before_the_validation_ends(
    tmp_path: Path, steps: int, returncode: int, line: str
) -> None:
    """Both ranks leave the pass together, which would take them 750 batches more. It may follow the last step."""
    config, out = tmp_path / "train.yaml", tmp_path / "out"
    root = write_robot(tmp_path / "robot", cameras={"top": (16, 16)}, lengths=(1500, 1500))
    text = TRAINING.format(backend="ddp").replace("value", "pi0").replace("steps: 1000", f"steps: {steps}")
    config.write_text(text.replace("synthetic", f"{{lerobot: {root}, validation: 0.5}}") + "validation: {every: 1, batch: 1}\n")
    process = subprocess.Popen(command(config, out), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (out / "metrics.jsonl").exists():  # written before the validation begins
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (start, *_), _ = read_events(out / "launch" / "events-rank1.jsonl")
    os.kill(start["pid"], signal.SIGUSR1)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == returncode, stderr
    assert line in stderr
    (checkpoint,) = list_checkpoints(out / "checkpoints")
    assert (checkpoint.name, read_manifest(checkpoint).score) == ("step-00000001", None)
    assert not (out / "validation.jsonl").exists()
