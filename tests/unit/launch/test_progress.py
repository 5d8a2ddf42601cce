"""Texts of a run's progress."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchbox.launch.progress import ConsoleProgress, format_clock, outcome_line
from tests.support.example_run import CELL, example_record
from tests.support.host_states import busy_state, quiet_state


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0:00"), (9.6, "0:10"), (59.7, "1:00"), (3599.0, "59:59"), (3600.0, "1:00:00"), (36_061.0, "10:01:01")],
)
def test_a_duration_is_formatted_like_a_clock(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


def record(status: str, **error: Any) -> dict[str, Any]:
    fields = {"type": "RuntimeError", "message": "boom\nand more", "rank": None, "phase": None, "traceback": None}
    return {"status": status, "duration_s": 1.25, "throughput": None, "error": {**fields, **error}}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ({}, "crash 1.2 s RuntimeError: boom"),
        ({"rank": 1, "phase": "clip", "stage": "measure"}, "crash 1.2 s (rank 1, clip) RuntimeError: boom"),
        ({"rank": 0, "stage": "build"}, "crash 1.2 s (rank 0, build) RuntimeError: boom"),
        ({"rank": None, "phase": "forward"}, "crash 1.2 s (forward) RuntimeError: boom"),
        ({"message": ""}, "crash 1.2 s RuntimeError: "),
    ],
)
def test_a_failed_launch_is_one_line_with_rank_phase_and_first_line_of_the_message(error: dict[str, Any], text: str) -> None:
    assert outcome_line(record("crash", **error)) == text


def test_a_launch_that_ended_ok_shows_its_throughput() -> None:
    throughput = {"global_samples_per_s": 1234.5, "per_rank_samples_per_s": [1234.5]}
    assert (
        outcome_line({"status": "ok", "duration_s": 3.0, "throughput": throughput, "error": None})
        == "ok 1.23e+03 samples/s 3.0 s"
    )


def test_a_launch_without_throughput_and_error_is_its_status() -> None:
    assert outcome_line({"status": "ok", "duration_s": 3.0, "throughput": None, "error": None}) == "ok 3.0 s"


def ended_lines(launch: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    progress = ConsoleProgress(Console(file=stream), lambda cell: cell.backend)
    with progress.display([(CELL, 1)], [(CELL, 1)], []):
        progress.launch_started(CELL, 1)
        progress.launch_ended(launch)
    return stream.getvalue().splitlines()


def test_a_launch_on_a_busy_host_is_followed_by_a_warning_with_its_cause() -> None:
    launch, warning = ended_lines({**example_record(), "host": busy_state()})
    assert launch.startswith("[1/1] ddp #1 ok ")
    assert warning == "warning: busy host during this launch: other processes used 18% of the CPU time"


def test_a_launch_on_a_quiet_host_and_one_of_unknown_state_are_one_line() -> None:
    assert len(ended_lines({**example_record(), "host": quiet_state()})) == len(ended_lines(example_record())) == 1


def test_a_launch_that_takes_longer_than_the_others_shortens_what_is_left_by_no_more_than_one() -> None:
    progress = ConsoleProgress(Console(file=io.StringIO()), lambda cell: cell.backend)
    launches = [(CELL, number) for number in range(1, 4)]
    with progress.display(launches, launches, []):
        progress.launch_started(CELL, 1)
        progress.launch_ended(example_record())
        progress.launch_started(CELL, 2)
        progress._started_at -= 1000.0
        assert progress._remaining_s() == 14.2


def test_without_a_terminal_a_long_run_says_at_times_how_much_is_left() -> None:
    stream = io.StringIO()
    progress = ConsoleProgress(Console(file=stream), lambda cell: cell.backend)
    launches = [(CELL, number) for number in range(1, 301)]
    with progress.display(launches, launches, []):
        for number in range(1, 301):
            progress.launch_started(CELL, number)
            progress.launch_ended(example_record(CELL, number))
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "left" in line] == ["about 47:20 left", "about 23:40 left"]  # of 14.2 s each
    assert len(lines) == 302
