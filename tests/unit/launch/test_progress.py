"""Texts of a run's progress."""

from __future__ import annotations

from typing import Any

import pytest

from benchbox.launch.progress import format_clock, outcome_line


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
