"""Trackers get the rows of metrics, and none of them can end a training."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.session import StepResult
from benchbox.spec.train import load_train
from benchbox.trainer.metrics import MetricsLog
from benchbox.trainer.trackers.fan_out import Trackers
from benchbox.trainer.trackers.tracker import TrackedTraining
from benchbox.worker import training

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class ListTracker:
    """Keeps what it gets; raises at a step, or when it is closed."""

    def __init__(self, fails_at: int | None = None, *, fails_to_close: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._fails_at = fails_at
        self._fails_to_close = fails_to_close

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise OSError("disk full\nand more")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1
        if self._fails_to_close:
            raise RuntimeError("no server")


def result() -> StepResult:
    return StepResult(torch.tensor(0.5), torch.tensor(2.0), {}, 8, (1e-4,), {})


def log_steps(folder: Path, trackers: Trackers, steps: int) -> list[dict[str, Any]]:
    log = MetricsLog(folder / "metrics.jsonl", start=0, block_steps=2, is_writer=True, trackers=trackers)
    for step in range(steps):
        log.add(step, result())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_tracker_gets_the_numbers_of_every_row() -> None:
    tracker = ListTracker()
    trackers = Trackers({"list": tracker})
    trackers.log({"step": 3, "loss": 0.5, "samples": 8, "mfu": None, "mfu_reason": "no peak", "warning": "w"})
    trackers.close()
    assert tracker.rows == [(3, {"loss": 0.5, "samples": 8.0})]
    assert tracker.closed == 1


def test_a_tracker_that_fails_is_one_warning_and_the_log_is_complete(tmp_path: Path) -> None:
    failing, healthy = ListTracker(fails_at=3), ListTracker()
    rows = log_steps(tmp_path, Trackers({"failing": failing, "healthy": healthy}), 8)
    assert [row["step"] for row in rows] == [step for step, _ in healthy.rows] == list(range(8))
    assert [row.get("warning") for row in rows] == [
        *[None] * 3,
        "tracker failing failed and gets no more values: OSError: disk full",
        *[None] * 4,
    ]
    assert [step for step, _ in failing.rows] == [0, 1, 2]
    assert failing.closed == 1


def test_a_tracker_that_cannot_be_opened_or_closed_is_a_warning(tmp_path: Path) -> None:
    """A file where TensorBoard makes its folder."""
    pytest.importorskip("tensorboard", reason="pip install 'benchbox[track]'")
    (tmp_path / "tensorboard").write_text("")
    training = TrackedTraining(name="t", folder=tmp_path, config={}, start=0)
    (warning,) = Trackers.open(["tensorboard"], training).take_warnings()
    assert warning.startswith("tracker tensorboard failed and gets no more values: ")
    trackers = Trackers({"list": ListTracker(fails_to_close=True)})
    trackers.close()
    assert trackers.take_warnings() == ["tracker list failed and gets no more values: RuntimeError: no server"]


def test_a_tracker_that_fails_to_close_is_a_line_in_the_log_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No row of metrics follows that could have the warning."""
    monkeypatch.setattr(Trackers, "open", lambda *_: Trackers({"list": ListTracker(fails_to_close=True)}))
    with training._open_trackers(load_train("pi05"), tmp_path, 0, 0):
        pass
    assert "warning: tracker list failed and gets no more values: RuntimeError: no server" in capsys.readouterr().err


def test_a_training_that_begins_again_replaces_all_steps_of_the_earlier_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'benchbox[track]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training = TrackedTraining(name="t", folder=tmp_path, config={}, start=0)
    for steps, loss in ((4, 1.0), (2, 2.0)):
        trackers = Trackers.open(["tensorboard"], training)
        for step in range(steps):
            trackers.log({"step": step, "loss": loss})
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 2.0), (1, 2.0)]


def test_a_resumed_training_replaces_only_the_steps_that_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'benchbox[track]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, loss in ((0, 1.0), (2, 2.0)):
        trackers = Trackers.open(["tensorboard"], TrackedTraining(name="t", folder=tmp_path, config={}, start=start))
        for step in range(start, 4):
            trackers.log({"step": step, "loss": loss})
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]


@pytest.mark.parametrize(("tracker", "key"), [("trackio", "name"), ("wandb", "id")])
def test_a_resumed_training_continues_its_own_run_beside_one_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, key: str
) -> None:
    runs: list[str] = []
    library = SimpleNamespace(init=lambda **options: runs.append(options[key]), Settings=dict)
    monkeypatch.setitem(sys.modules, tracker, library)
    module = f"benchbox.trainer.trackers.{tracker}"
    monkeypatch.setitem(sys.modules, module, library)  # so that what is imported in its place is removed afterwards
    del sys.modules[module]
    for folder, start in (("a", 0), ("b", 0), ("a", 2), ("b", 0)):
        (tmp_path / folder).mkdir(exist_ok=True)
        training = TrackedTraining(name="t", folder=tmp_path / folder, config={}, start=start)
        assert Trackers.open([tracker], training).take_warnings() == []
    first, second, resumed, anew = runs
    assert resumed == first
    assert len({first, second, anew}) == 3
