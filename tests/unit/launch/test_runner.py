"""Counts of the launches of one invocation."""

from __future__ import annotations

from benchbox.launch.runner import RunSummary


def test_the_launches_of_an_invocation_are_added_up_and_how_it_ended_is_how_the_last_did() -> None:
    first = RunSummary(reused=2, executed=3, skipped=1, remaining=4, failed_cells={"a"})
    last = RunSummary(reused=1, executed=2, skipped=5, remaining=6, failed_cells={"b"}, stopped=True)
    expected = RunSummary(reused=3, executed=5, skipped=6, remaining=6, failed_cells={"a", "b"}, stopped=True)
    assert first.followed_by(last) == expected
