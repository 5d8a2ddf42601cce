"""Splitting the steps of ranks by when each arrived at the collectives."""

from __future__ import annotations

from typing import Any

import pytest

from benchbox.registry.phases import STEP_PARTS
from benchbox.store.step_split import split_steps

MS = 1_000_000
NAMES = ("a", "b")


def result(arrivals: list[int], blocked: list[tuple[int, int]], *, until: str = "completion", **changes: Any) -> dict[str, Any]:
    """Return what a rank measured in one step of 100 ms, of which it waited 10 ms for data."""
    times = {
        "clock": "host",
        "steps": [[0, 100 * MS]],
        "arrivals": [[[name, at * MS] for name, at in zip(NAMES, arrivals, strict=True)]],
        "blocked": [[{"start": start * MS, "end": end * MS, "until": until} for start, end in blocked]],
        "core_wait_s": [0.005],
    }
    return {"step_time_s": [0.1], "phases_s": {"data_wait": [0.01]}, "collective_times": times | changes}


def parts(ranks: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the parts of the step in ms, by rank."""
    split, reason = split_steps(ranks)
    assert reason is None
    assert tuple(split) == STEP_PARTS
    return [{part: round(1e3 * split[part]["per_rank"][rank][0], 6) for part in split} for rank in range(len(ranks))]


def test_a_rank_waits_until_the_last_has_arrived_and_for_the_transfer_from_then_on() -> None:
    early, late = parts([result([20, 80], [(20, 55), (80, 90)]), result([50, 70], [(50, 55), (70, 90)])])
    assert early == {"data_wait": 10, "compute": 40, "core_wait": 5, "rank_wait": 30, "transfer": 15}
    assert late == {"data_wait": 10, "compute": 60, "core_wait": 5, "rank_wait": 10, "transfer": 15}


def test_collectives_that_nobody_waits_for_cost_nothing() -> None:
    """Ranks go on with their work after launching the first; only the wait at the end counts."""
    early, late = parts([result([20, 60], [(60, 75)]), result([50, 70], [(70, 75)])])
    assert (early["rank_wait"], early["transfer"]) == (10, 5)
    assert (late["rank_wait"], late["transfer"]) == (0, 5)


def test_a_wait_of_unknown_end_lasts_until_the_last_has_arrived() -> None:
    early, late = parts([result([20, 60], [(60, 95)], until="arrival"), result([50, 70], [(70, 95)], until="arrival")])
    assert (early["rank_wait"], early["transfer"]) == (10, 0)
    assert (late["rank_wait"], late["transfer"]) == (0, 0)


@pytest.mark.parametrize("end", [10, 250], ids=["set-back", "set-forward"])
def test_a_clock_that_was_set_in_a_step_gives_no_split(end: int) -> None:
    """Waits are taken from the clock of the host, and the step of 100 ms from another one."""
    reason = "waits are longer than their step: the clock of the host was set while it was measured"
    assert split_steps([result([20, 60], [(60, end)]), result([20, 60], [(60, 75)])]) == (None, reason)


def test_waiting_for_a_core_is_no_more_than_the_own_work() -> None:
    early, _ = parts([result([20, 60], [(60, 75)], core_wait_s=[9.0]), result([50, 70], [(70, 75)])])
    assert (early["compute"], early["core_wait"]) == (0, 75)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clock": "another"}, "ranks are on different hosts, whose clocks are not compared"),
        (None, "there is one rank"),
    ],
)
def test_ranks_without_a_common_clock_have_no_split(changes: dict[str, Any] | None, reason: str) -> None:
    other = result([50, 70], [(70, 75)], **(changes or {}))
    if changes is None:
        other |= {"collective_times": None, "collective_times_reason": "there is one rank"}
    assert split_steps([result([20, 60], [(60, 75)]), other]) == (None, reason)


def test_a_group_without_results_has_no_split() -> None:
    assert split_steps([]) == (None, "a rank did not record its collectives")
