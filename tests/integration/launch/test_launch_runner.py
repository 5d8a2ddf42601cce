"""A run: order, failures, resuming. Launches are real processes of the stand-in worker."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchbox.launch.progress import ConsoleProgress
from benchbox.launch.runner import RunSummary, _Failures, run_matrix
from benchbox.spec.cell import Cell, MeasureSpec
from benchbox.store.run import RunStore
from tests.support.example_run import example_record
from tests.support.launchers import MEASURE, DirectLauncher, cell

HEALTHY, BROKEN, UNSUPPORTED = cell("healthy", 1), cell("dies_at_import", 1), cell("unsupported", 1)


class Bench:
    """Runs of the same directory, one after another, and what they printed."""

    def __init__(self, path: Path, policy_dir: Path) -> None:
        self.store = RunStore(path)
        self.policy_dir = policy_dir
        self.launcher = DirectLauncher()
        self.text = ""

    def run(
        self, *cells: Cell, launches: int = 1, measure: MeasureSpec = MEASURE, terminal: bool = False, **options: object
    ) -> RunSummary:
        out = io.StringIO()
        self.launcher.started.clear()
        summary = run_matrix(
            [(cell, n) for n in range(1, launches + 1) for cell in cells],
            measure=measure,
            store=self.store,
            launcher=self.launcher,
            progress=ConsoleProgress(Console(file=out, force_terminal=terminal, width=100), lambda cell: f"size={cell.size}"),
            policy_dirs=[self.policy_dir],
            **{"stop": lambda: False, **options},
        )
        self.text = out.getvalue()
        return summary

    def statuses(self) -> list[str]:
        paths = (self.store.path / "cells").glob("*/launch-*.json")
        records = (json.loads(path.read_text()) for path in paths)
        return sorted(f"{record['cell']['size']} {record['launch']} {record['status']}" for record in records)


@pytest.fixture
def bench(tmp_path: Path, policy_dir: Path) -> Bench:
    return Bench(tmp_path / "run", policy_dir)


def test_launches_run_in_the_given_order_and_a_failing_cell_stops_nothing(bench: Bench) -> None:
    summary = bench.run(BROKEN, HEALTHY, launches=2)
    assert bench.launcher.started == [("dies_at_import", 1), ("healthy", 1), ("dies_at_import", 2), ("healthy", 2)]
    assert summary.failed_cells == {BROKEN.cell_id}
    assert bench.statuses() == ["dies_at_import 1 crash", "dies_at_import 2 crash", "healthy 1 ok", "healthy 2 ok"]


def test_one_plain_line_tells_how_each_launch_ended(bench: Bench) -> None:
    bench.run(BROKEN, HEALTHY)
    failed, ok = bench.text.splitlines()
    assert failed.startswith("[1/2] size=dies_at_import #1 crash")
    assert "LaunchError" in failed
    assert ok.startswith("[2/2] size=healthy #1 ok 20 samples/s")  # 2 samples in 0.1 s


def test_on_a_terminal_a_display_shows_what_is_done_and_what_runs(bench: Bench) -> None:
    bench.run(BROKEN, HEALTHY, terminal=True)
    assert "1/2 launches  1/2 cells  1 failed" in bench.text
    assert "size=healthy #1  " in bench.text
    assert "[2/2] size=healthy #1 ok" in bench.text


def test_a_second_run_does_only_what_is_missing_or_failed(bench: Bench) -> None:
    bench.run(HEALTHY, BROKEN)
    summary = bench.run(HEALTHY, BROKEN, cell("healthy", 1, seed=1))
    assert bench.launcher.started == [("dies_at_import", 1), ("healthy", 1)]
    assert (summary.reused, summary.executed) == (1, 2)
    assert "it ended crash last time" in bench.text


def test_a_record_of_other_sources_is_measured_again_with_a_line_saying_so(bench: Bench) -> None:
    bench.run(HEALTHY, launches=2)
    (bench.policy_dir / "stand_in" / "policy.py").write_text("def build(preset, axes): return None\n")
    assert bench.run(HEALTHY, launches=2).executed == 2
    assert bench.text.splitlines()[0] == "measuring 2 launches again: the sources of policy stand_in have changed since"
    assert bench.run(HEALTHY, launches=2).reused == 2


def test_launches_that_another_launcher_measured_are_reused_with_a_line_saying_so(bench: Bench) -> None:
    bench.run(HEALTHY)
    assert "launched by" not in bench.text
    bench.launcher.name = "another"
    assert bench.run(HEALTHY).reused == 1
    assert "reusing 1 launch not comparable with new ones: they were launched by direct, and this" in bench.text


def test_a_record_of_another_number_of_steps_is_measured_again(bench: Bench) -> None:
    bench.run(HEALTHY)
    assert bench.run(HEALTHY, measure=replace(MEASURE, steps=5)).executed == 1
    assert "5 after 1 are asked for" in bench.text


def test_a_cell_that_would_end_the_same_is_launched_once_an_invocation(bench: Bench) -> None:
    summary = bench.run(UNSUPPORTED, launches=3)
    assert (summary.executed, summary.skipped) == (1, 2)
    assert bench.statuses() == ["unsupported 1 unsupported"]
    assert bench.run(UNSUPPORTED, launches=3).executed == 1


def test_launches_that_are_not_run_any_more_have_no_record_of_before(bench: Bench) -> None:
    """The report would show those of an older benchbox as measured."""
    earlier: list[Any] = [example_record(UNSUPPORTED, launch) for launch in (1, 2, 3)]
    for record in earlier:
        bench.store.write_record(record)
    assert bench.run(UNSUPPORTED, launches=3).skipped == 2
    assert bench.statuses() == ["unsupported 1 unsupported"]


@pytest.mark.parametrize("status", ["unsupported", "mismatch", "oom"])
def test_a_failure_that_another_launch_would_not_change_counts_at_once(status: str) -> None:
    failures = _Failures()
    record: Any = {"cell_id": "a", "status": status, "error": {"type": "SomeError"}}
    failures.add(record)
    assert failures.hopeless == {"a": status}


def test_a_cell_that_fails_three_times_in_a_row_in_the_same_way_is_not_launched_again(bench: Bench) -> None:
    summary = bench.run(BROKEN, HEALTHY, launches=5)
    assert [launch for size, launch in bench.launcher.started if size == "dies_at_import"] == [1, 2, 3]
    assert (summary.executed, summary.skipped) == (8, 2)
    assert "[7/10] size=dies_at_import #4 not run: it would end crash too" in bench.text
    assert bench.statuses() == [f"dies_at_import {n} crash" for n in (1, 2, 3)] + [f"healthy {n} ok" for n in range(1, 6)]


def test_a_failure_of_another_kind_begins_the_count_again() -> None:
    failures = _Failures()
    record: Any = {"cell_id": "a", "status": "crash", "error": {"type": "RuntimeError"}}
    for kind in ("RuntimeError", "RuntimeError", "Killed", "RuntimeError", "RuntimeError"):
        failures.add({**record, "error": {"type": kind}})
    for status in ("ok", "crash", "crash"):
        failures.add({**record, "status": status, "error": None if status == "ok" else {"type": "RuntimeError"}})
    assert failures.hopeless == {}
    failures.add(record)
    assert failures.hopeless == {"a": "crash"}


def test_a_stopped_run_is_resumed_where_it_stopped(bench: Bench) -> None:
    cells = [cell("healthy", 1, seed=seed) for seed in range(3)]
    summary = bench.run(*cells, stop=lambda: len(bench.launcher.started) == 2)
    assert (summary.stopped, summary.executed, summary.remaining) == (True, 1, 2)
    assert bench.statuses() == ["healthy 1 interrupted", "healthy 1 ok"]
    resumed = bench.run(*cells)
    assert (resumed.reused, resumed.executed) == (1, 2)
    assert bench.statuses() == ["healthy 1 ok"] * 3


def test_a_stop_between_two_launches_begins_no_other(bench: Bench) -> None:
    """No launch was interrupted then, so the summary alone tells that the user stopped."""
    cells = [cell("healthy", 1, seed=seed) for seed in range(3)]
    summary = bench.run(*cells, stop=lambda: bool(bench.statuses()))
    assert (summary.stopped, summary.executed, summary.remaining) == (True, 1, 2)
    assert bench.statuses() == ["healthy 1 ok"]
    assert bench.launcher.started == [("healthy", 1)]


def test_a_policy_that_is_edited_while_it_is_measured_is_measured_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the sources from before the ranks read them, so that it can only look older than it is."""
    start = bench.launcher.start

    def edit_and_start(job: Any) -> Any:
        (bench.policy_dir / "stand_in" / "policy.py").write_text("def build(preset, axes): return 1\n")
        return start(job)

    monkeypatch.setattr(bench.launcher, "start", edit_and_start)
    assert bench.run(HEALTHY).executed == 1
    assert bench.run(HEALTHY).executed == 1
    assert "the sources of policy stand_in have changed since" in bench.text
    assert bench.run(HEALTHY).reused == 1
