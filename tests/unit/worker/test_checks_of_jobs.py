"""Jobs end when what runs is not what was requested."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch._dynamo.utils import counters

from benchbox.backends.base import Backend
from benchbox.backends.replicated import _Replicated
from benchbox.errors import MismatchError, UnsupportedError
from benchbox.measure.phases import ProgressTracker
from benchbox.session import build_session, host_memory
from benchbox.session.build import build_cell_policy
from benchbox.spec.cell import MeasureSpec
from benchbox.store.events import EventWriter
from benchbox.worker import measuring, profiling, training
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchbox.spec.cell import Cell

ALONE = tiny_cell(policy="value", backend="single", world_size=1, batch=1, recipe="fp32")
DDP = replace(ALONE, backend="ddp", world_size=2)


def build_alone(cell: Cell, *arguments: Any) -> Any:
    """Build a session of one process that compiles nothing, whatever the cell asks for."""
    return build_session(replace(cell, backend="single", world_size=1, compile="off"), *arguments)


def train(cell: Cell, folder: Path) -> None:
    config = {"name": "t", "cell": cell.to_dict(), "steps": 1, "log_every": 1, "hang_after_s": 60.0}
    job: Any = {"train": config, "folder": str(folder / "out"), "checkpoint": None, "policy_dirs": []}
    signals: Any = SimpleNamespace(requested=None, defer=lambda: None)
    training.train(job, 0, ProgressTracker(), EventWriter(folder / "events", 0), signals)


def test_a_training_that_runs_on_another_backend_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "build_session", build_alone)
    with pytest.raises(MismatchError, match="requested backend ddp, observed single"):
        train(DDP, tmp_path)


def test_a_training_on_a_backend_that_cannot_be_saved_says_so_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Replicated, "training_state", Backend.training_state)
    config = {"name": "t", "cell": ALONE.to_dict(), "steps": 2, "log_every": 1, "hang_after_s": 60.0}
    job: Any = {"train": config, "folder": str(tmp_path / "out"), "checkpoint": None, "policy_dirs": []}
    tracker, signals = ProgressTracker(), SimpleNamespace(requested=None, defer=lambda: None)
    with pytest.raises(UnsupportedError, match="single cannot be saved: Single defines no training_state"):
        training.train(job, 0, tracker, EventWriter(tmp_path / "events", 0), signals)
    assert tracker.state.stage == "prepare"


def profile(cell: Cell, folder: Path) -> None:
    steps = dict.fromkeys(("warmup_steps", "timed_steps", "profiled_steps"), 1)
    job: Any = {"cell": cell.to_dict(), "policy_dirs": [], "traces": str(folder), **steps}
    profiling.profile(job, folder, 0, ProgressTracker(), EventWriter(folder / "events", 0))


def test_a_profile_of_another_backend_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "build_session", build_alone)
    with pytest.raises(MismatchError, match="requested backend ddp, observed single"):
        profile(DDP, tmp_path)


def test_a_profile_of_another_attention_kernel_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        profiling, "build_cell_policy", lambda cell, folders: build_cell_policy(replace(cell, attention="eager"), folders)
    )
    with pytest.raises(MismatchError, match="requested sdpa attention, observed eager"):
        profile(replace(ALONE, attention="sdpa"), tmp_path)


@pytest.mark.usefixtures("compiling")
def test_a_profile_in_which_nothing_was_compiled_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters.clear()  # of earlier tests in this process
    monkeypatch.setattr(profiling, "build_session", build_alone)
    with pytest.raises(MismatchError, match="requested compile blocks, observed that nothing was compiled"):
        profile(replace(ALONE, compile="blocks"), tmp_path)


def measure_compiled(folder: Path, **spec: Any) -> None:
    measure = MeasureSpec(**{"warmup_steps": 1, "steps": 1, "launches": 1, **spec})
    cell = replace(ALONE, compile="blocks").to_dict()
    job: Any = {"cell": cell, "measure": asdict(measure), "policy_dirs": [], "launch": 1}
    measuring.measure(job, folder, 0, ProgressTracker(), EventWriter(folder / "events", 0))


@pytest.mark.usefixtures("compiling")
def test_a_measurement_in_which_nothing_was_compiled_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters.clear()  # of earlier tests in this process
    monkeypatch.setattr(measuring, "build_session", build_alone)
    with pytest.raises(MismatchError, match="requested compile blocks, observed that nothing was compiled"):
        measure_compiled(tmp_path)


def test_a_memory_limit_on_compiled_code_is_refused_where_only_operations_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "build_session", build_alone)
    with pytest.raises(UnsupportedError, match="a memory limit on a cpu counts tensors of operations: write compile: off"):
        measure_compiled(tmp_path, memory_limit=2**30)


def measure(cell: Cell, folder: Path) -> None:
    job: Any = {"cell": cell.to_dict(), "measure": asdict(MeasureSpec()), "policy_dirs": [], "launch": 1}
    measuring.measure(job, folder, 0, ProgressTracker(), EventWriter(folder / "events", 0))


@pytest.mark.parametrize("run", [measure, train, profile])
def test_weights_that_the_machine_has_no_memory_for_are_refused_before_there_are_any(
    run: Callable[[Cell, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "usable_memory_bytes", lambda: 2**10)
    with pytest.raises(UnsupportedError, match="choose another size or machine"):
        run(ALONE, tmp_path)
    assert "prepare" not in (tmp_path / "events").read_text()
