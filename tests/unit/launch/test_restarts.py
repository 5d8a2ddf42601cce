"""Failures of a training that are worth a restart."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from benchbox.errors import ConfigurationError
from benchbox.launch import training
from benchbox.launch.process import make_launcher
from benchbox.launch.restarts import is_restartable, read_restarts, record_restart
from benchbox.launch.supervise.outcome import Outcome
from benchbox.launch.training_progress import TrainingProgress
from benchbox.spec.train import load_train
from benchbox.store.checkpoints import list_checkpoints
from tests.support.saved_checkpoints import save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.launch.job import Job


def outcome(status: str, kind: str, stage: str | None = "train") -> Outcome:
    error: Any = {"type": kind, "message": "said so\nand more", "rank": 1, "phase": None, "traceback": None, "stage": stage}
    return Outcome(status, error)


def launch(folder: Path, stop_signals: Sequence[str] = ()) -> Outcome:
    """Launch a training that may be restarted once."""
    progress = TrainingProgress(config := load_train("pi05"), Console(file=io.StringIO()))
    return training.launch_training(
        config,
        folder,
        resume=False,
        launcher=make_launcher("local"),
        max_restarts=1,
        progress=progress,
        stop_signals=stop_signals,
    )


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (outcome("crash", "Killed", "build"), True),
        (outcome("crash", "Terminated"), True),
        (outcome("crash", "ExitError"), True),
        (outcome("crash", "RuntimeError"), True),
        (outcome("crash", "RuntimeError", "build"), False),  # before the first step: it would be raised again
        (outcome("crash", "RuntimeError", "validate"), True),
        (outcome("crash", "ThresholdError"), False),  # an audit ended it
        (outcome("crash", "GradientSpikeError"), False),
        (outcome("crash", "DataError"), False),
        (outcome("crash", "CheckpointError"), False),  # the disk is full
        (outcome("crash", "LaunchError", None), False),
        (outcome("unsupported", "ConfigurationError"), False),
        (outcome("nan", "NonFiniteError"), False),
        (outcome("oom", "OutOfMemoryError"), False),
        (outcome("hang", "Hang"), False),
        (outcome("interrupted", "Interrupted"), False),
        (Outcome("ok"), False),
    ],
)
def test_only_a_process_that_died_or_an_error_of_a_step_is_worth_a_restart(ending: Outcome, expected: bool) -> None:
    assert is_restartable(ending) is expected


def test_the_count_and_the_files_of_failed_ranks_are_kept_over_invocations(tmp_path: Path) -> None:
    for invocation in (1, 2):
        (tmp_path / "launch").mkdir()
        (tmp_path / "launch/rank1.log").write_text(str(invocation))
        restart = record_restart(tmp_path, outcome("crash", "Killed"), 1, 3)
        assert restart.reason == "rank 1: Killed: said so"
        assert restart.from_step == 0
    assert [entry["files"] for entry in read_restarts(tmp_path)] == ["launch-failed-1", "launch-failed-2"]
    assert (tmp_path / "launch-failed-2/rank1.log").read_text() == "2"


def test_without_an_intact_checkpoint_a_training_ends_as_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_once(config: object, job: Job, folder: Path, *_: object) -> Outcome:
        (save_checkpoint(folder / "checkpoints", 1) / "tensors.bin").write_bytes(b"")
        return outcome("crash", "Killed")

    monkeypatch.setattr(training, "_run_once", run_once)
    assert launch(tmp_path) == outcome("crash", "Killed")
    assert "no restart: " in capsys.readouterr().err


def test_a_training_that_was_asked_to_stop_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system that ends a job signals the command and kills ranks."""
    runs = []

    def run_once(*_: object) -> Outcome:
        runs.append(tmp_path)
        return outcome("crash", "Killed")

    monkeypatch.setattr(training, "_run_once", run_once)
    assert launch(tmp_path, ["SIGTERM"]) == outcome("crash", "Killed")
    assert len(runs) == 1
    assert not read_restarts(tmp_path)


def test_a_training_that_begins_anew_keeps_nothing_of_one_that_saved_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("metrics.jsonl", "validation.jsonl", "findings.jsonl", "restarts.json"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "job.json").write_text('{"kind": "train"}')
    monkeypatch.setattr(training, "_run_once", lambda *_: Outcome("ok"))
    assert launch(tmp_path) == Outcome("ok")
    assert [path.name for path in tmp_path.iterdir()] == ["launch"]


def test_the_capacity_of_a_machine_is_compared_with_the_ranks_of_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of 8 ranks; those of all nodes may be more."""
    monkeypatch.setattr("benchbox.launch.capacity.usable_cores", lambda: 1)
    config = load_train("pi05", {"backend": "ddp", "world_size": "16"})
    progress = TrainingProgress(config, Console(file=io.StringIO()))
    refusals = []
    for nnodes in (2, 1):
        try:
            training._check(config, tmp_path, resume=False, nnodes=nnodes, progress=progress)
        except ConfigurationError as error:
            refusals.append((nnodes, str(error).partition(",")[0]))
    assert refusals == [(1, "16 ranks are more than 8")]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_restart_continues_from_the_newest_intact_checkpoint(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks of this training are a stand-in: the first ones save two checkpoints, and one of them is killed."""
    found = []

    def run_once(config: object, job: Job, folder: Path, *_: object) -> Outcome:
        found.append([path.name for path in list_checkpoints(folder / "checkpoints")])
        if len(found) > 1:
            return Outcome("ok")
        (folder / "launch").mkdir()
        paths = [save_checkpoint(folder / "checkpoints", steps) for steps in (1, 2)]
        if damaged:
            (paths[-1] / "tensors.bin").write_bytes(b"")
        return outcome("crash", "Killed")

    monkeypatch.setattr(training, "_run_once", run_once)
    assert launch(tmp_path) == Outcome("ok")
    assert found == [[], ["step-00000001"] if damaged else ["step-00000001", "step-00000002"]]
    assert read_restarts(tmp_path)[0]["from_step"] == (1 if damaged else 2)
    assert ("damaged checkpoint" in capsys.readouterr().err) == damaged
