"""The loop trains, logs every step, and saves checkpoints from which a training continues."""

from __future__ import annotations

import json
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.errors import ConfigurationError, NonFiniteError, ThresholdError
from benchbox.measure.phases import NONE
from benchbox.spec.train import CheckpointSection
from benchbox.store.checkpoints import list_checkpoints, read_manifest
from benchbox.trainer.checkpoint import CheckpointManager
from benchbox.trainer.loop import train
from benchbox.trainer.metrics import MetricsLog
from tests.support.metrics_rows import without_measurements
from tests.support.small_session import SmallSession, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from benchbox.session import StepResult
    from benchbox.spec.cell import Cell


def run(
    session: SmallSession,
    folder: Path,
    checkpoints: CheckpointManager | None,
    *,
    steps: int,
    start: int = 0,
    stream: Iterator[Tensor] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train a session, and return the rows of its metrics without times."""
    folder.mkdir(exist_ok=True)
    log = MetricsLog(folder / "metrics.jsonl", start=start, block_steps=10, is_writer=True)
    train(session, stream or batches(start), start=start, steps=steps, metrics=log, checkpoints=checkpoints, **options)
    return read_rows(folder)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return without_measurements(rows)


def saved(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def test_every_step_is_logged_and_checkpoints_are_saved_at_the_interval_and_at_the_end(
    tmp_path: Path, checkpoints: CheckpointManager
) -> None:
    rows = run(SmallSession(), tmp_path, checkpoints, steps=5)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert saved(tmp_path) == ["step-00000004", "step-00000005"], "the newest two of 2, 4 and 5"


def test_a_restored_session_continues_bit_for_bit(tmp_path: Path, checkpoints: CheckpointManager) -> None:
    """Weights, masters, moments, schedule and random numbers: a session built from another seed ends alike."""
    straight = SmallSession()
    rows = run(straight, tmp_path / "straight", None, steps=6)
    run(SmallSession(), tmp_path, checkpoints, steps=4)
    resumed = SmallSession(seed=1)
    checkpoints.restore(resumed, tmp_path / "checkpoints" / "step-00000004")
    assert run(resumed, tmp_path, checkpoints, start=4, steps=6) == rows
    pairs = [(straight.model.state_dict(), resumed.model.state_dict())]
    pairs += zip(straight.optimizer.state.values(), resumed.optimizer.state.values(), strict=True)
    pairs.append((dict(enumerate(straight.optimizer.masters)), dict(enumerate(resumed.optimizer.masters))))
    for expected, actual in pairs:
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_loss_that_is_not_finite_ends_the_training_before_the_next_checkpoint(
    tmp_path: Path, checkpoints: CheckpointManager
) -> None:
    """The row that shows it is in the log, and the newest checkpoint is from before."""
    stream = chain([next(batches())] * 2, [torch.full((2, 8), float("nan"), dtype=torch.bfloat16)], batches())
    with pytest.raises(NonFiniteError, match="step 2: loss is nan"):
        run(SmallSession(), tmp_path, checkpoints, steps=8, stream=stream)
    assert saved(tmp_path) == ["step-00000002"]
    assert read_rows(tmp_path)[2]["loss"] is None, "JSON has no NaN"
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2, 3]


def test_without_checkpoints_none_are_saved_and_progress_is_reported_after_every_step(tmp_path: Path) -> None:
    session, learning_rates = SmallSession(), []
    rows = run(
        session,
        tmp_path,
        None,
        steps=3,
        after_step=lambda: learning_rates.append(session.optimizer.param_groups[0]["lr"]),
    )
    assert len(learning_rates) == len(rows) == 3
    assert learning_rates[:-1] == [row["lr"] for row in rows[1:]], "the schedule is ahead by one step"
    assert not (tmp_path / "checkpoints").exists()


def test_a_training_that_is_asked_to_stop_saves_after_the_step_and_ends(tmp_path: Path, checkpoints: CheckpointManager) -> None:
    """Whatever the interval is, and the rows are written though their block is not full."""
    answers = iter([False, False, True])
    rows = run(SmallSession(), tmp_path, checkpoints, steps=8, stopping=lambda: next(answers))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert saved(tmp_path) == ["step-00000002", "step-00000003"]


class EndingAudit:
    """Audit that is due after every third step, and ends the training then."""

    def __init__(self, session: SmallSession) -> None:
        self._session = session
        self.steps: list[int] = []

    def take_step(self, step: int, batches: Iterator[Tensor], instruments: Any) -> StepResult:
        self.steps.append(step)
        return self._session.step(batches, instruments)

    def is_due(self, completed: int) -> bool:
        return completed % 3 == 0

    def judge(self, completed: int) -> None:
        raise ThresholdError(f"after {completed}")


def test_an_audit_that_ends_the_training_leaves_its_rows_and_no_checkpoint(
    tmp_path: Path, checkpoints: CheckpointManager
) -> None:
    session = SmallSession()
    audit = EndingAudit(session)
    with pytest.raises(ThresholdError, match="after 3"):
        run(session, tmp_path, checkpoints, steps=3, audit=audit)
    assert audit.steps == [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2]
    assert saved(tmp_path) == ["step-00000002"]


class NotedValidation:
    """Validation that is due after every second step, and notes after which steps it ran."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def is_due(self, completed: int, *, last: bool) -> bool:
        return completed > 0 and completed % 2 == 0

    def check_metric(self, parts: Any) -> None: ...

    def check_score(self) -> None: ...

    def run(self, session: SmallSession, completed: int, stopping: Callable[[], bool]) -> float:
        self.steps.append(completed)
        return 0.5


def test_a_training_that_is_asked_to_stop_does_not_validate_before_it_ends(tmp_path: Path) -> None:
    answers, stopped, ended = iter([False, True]), NotedValidation(), NotedValidation()
    run(SmallSession(), tmp_path / "stopped", None, steps=8, stopping=lambda: next(answers), validation=stopped)
    run(SmallSession(), tmp_path / "ended", None, steps=2, validation=ended)
    assert (stopped.steps, ended.steps) == ([], [2])


def test_a_training_that_is_asked_to_stop_while_it_validates_saves_without_a_score_and_ends(
    tmp_path: Path, checkpoints: CheckpointManager
) -> None:
    class LongValidation(NotedValidation):
        """Validation after every step, which takes two batches."""

        def is_due(self, completed: int, *, last: bool) -> bool:
            return completed > 0

        def run(self, session: SmallSession, completed: int, stopping: Callable[[], bool]) -> float | None:
            return None if stopping() or stopping() else super().run(session, completed, stopping)

    answers, validation = iter([False, False, False, False, False, True]), LongValidation()
    rows = run(SmallSession(), tmp_path, checkpoints, steps=8, stopping=lambda: next(answers), validation=validation)
    assert validation.steps == [1]
    assert [row["step"] for row in rows] == [0, 1]
    (newest,) = list_checkpoints(tmp_path / "checkpoints")
    assert (newest.name, read_manifest(newest).score) == ("step-00000002", None)


def test_a_training_whose_validation_has_no_score_ends_after_a_checkpoint(
    tmp_path: Path, checkpoints: CheckpointManager
) -> None:
    """The checkpoint would not be due yet: with another metric, the training continues from it."""

    class UnscoredValidation(NotedValidation):
        def is_due(self, completed: int, *, last: bool) -> bool:
            return completed == 3

        def run(self, session: SmallSession, completed: int, stopping: Callable[[], bool]) -> None:
            self.steps.append(completed)

        def check_score(self) -> None:
            if self.steps:
                raise ConfigurationError("no validation sample has 'rare'")

    with pytest.raises(ConfigurationError, match="no validation sample has 'rare'"):
        run(SmallSession(), tmp_path, checkpoints, steps=8, validation=UnscoredValidation())
    assert saved(tmp_path) == ["step-00000002", "step-00000003"]
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2]


def test_validations_checkpoints_and_audits_are_no_part_of_the_time_of_steps(
    tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    class TimedSession(SmallSession):
        def step(self, batches: Iterator[Tensor], instruments: Any = NONE) -> StepResult:
            now_s[0] += 1.0
            return super().step(batches, instruments)

    class TimedValidation(NotedValidation):
        def run(self, session: SmallSession, completed: int, stopping: Callable[[], bool]) -> float:
            now_s[0] += 60.0
            return super().run(session, completed, stopping)

    class TimedAudit(EndingAudit):
        def judge(self, completed: int) -> None:
            now_s[0] += 7.0

    class TimedCheckpoints(CheckpointManager):
        def save(self, session: Any, steps: int, *, score: float | None = None) -> Path:
            now_s[0] += 5.0
            return super().save(session, steps, score=score)

    session = TimedSession()
    manager = TimedCheckpoints(tmp_path / "checkpoints", cell, CheckpointSection(every=4, background=False))
    run(session, tmp_path, manager, steps=8, validation=TimedValidation(), audit=TimedAudit(session))
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step_s"] for row in written] == [1.0] * 8
    assert [row.get("outside_steps_s") for row in written] == [
        None, None, {"validation": 60.0}, {"audit": 7.0}, {"validation": 60.0, "checkpoint": 5.0}, None,
        {"audit": 7.0, "validation": 60.0}, None,
    ]  # fmt: skip
