"""Trends over runs: where they change, and where they only scatter."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from benchbox.analysis import trends
from benchbox.analysis.trends import Trend, TrendPoint, mark_changes, order_points
from benchbox.registry.metrics import metric_by_name
from benchbox.store.noise import Noise

SIGMA = 0.01
ENVIRONMENT = {"machine": "quiet", "torch": "2.12", "threads": 1}


def point(position: int, level: float, noise: random.Random, *, launches: int = 5, **changes) -> TrendPoint:
    values = tuple(level * math.exp(noise.gauss(0, SIGMA)) for _ in range(launches))
    fields = {
        "run": f"runs/{position}",
        "commit": f"{position:040x}",
        "dirty": False,
        "started_at": f"2026-01-{position + 1:02}",
        "value": sorted(values)[launches // 2],
        "low": min(values),
        "high": max(values),
        "launches": values,
        "environment": ENVIRONMENT,
        "steps": 5,
    }
    return TrendPoint(**fields | changes)


def trend(levels, *, seed: int = 0, metric: str = "global_samples_per_s", cell: str = "a", **changes) -> Trend:
    noise = random.Random(seed)
    points = tuple(point(position, level, noise, **changes) for position, level in enumerate(levels))
    return Trend(cell_id=cell, cell=cell, metric=metric_by_name(metric), points=points)


def changed_at(marked: Trend) -> list[int]:
    return [change.index for change in marked.changes]


def test_two_changes_are_found_with_the_commits_on_both_sides():
    (marked,) = mark_changes([trend([100.0] * 6 + [80.0] * 5 + [110.0] * 4)])
    assert changed_at(marked) == [6, 11]
    first, second = marked.changes
    assert (first.is_worse, second.is_worse) == (True, False)
    assert (first.before.commit, first.after.commit) == (f"{5:040x}", f"{6:040x}")
    assert first.low < first.ratio < first.high
    assert first.ratio == pytest.approx(0.8, abs=0.02)


def test_noise_changes_in_at_most_one_of_a_hundred_matrices():
    """100 matrices of 10 cells and 12 runs: one wrong change is expected at most, and more than four have 0.4%."""
    wrong = 0
    for seed in range(100):
        cells = [trend([100.0] * 12, seed=100 * seed + cell, launches=3) for cell in range(10)]
        wrong += any(marked.changes for marked in mark_changes(cells))
    assert wrong <= 4


def test_a_change_that_is_not_relevant_is_none():
    small = trend([100.0] * 10 + [106.0] * 10)
    assert mark_changes([small], relevant=0.1)[0].changes == ()
    assert changed_at(mark_changes([small])[0]) == [10]


def test_a_change_within_the_noise_floor_of_the_machine_is_none():
    noise = Noise(sigma=0.2, launches=20, ratio=1.0, cell="a", measured_at="2026-01-01", benchbox_version="1")
    stepped = trend([100.0] * 6 + [90.0] * 6)
    assert changed_at(mark_changes([stepped])[0]) == [6]
    assert mark_changes([stepped], noise=noise)[0].changes == ()


def test_many_cells_need_more_evidence_than_one():
    """Five launches against five have p = 2 / 252, which is enough for one cell and not for two."""
    stepped, other = trend([100.0, 50.0]), trend([100.0, 100.0], seed=1)
    assert changed_at(mark_changes([stepped])[0]) == [1]
    assert [changed_at(marked) for marked in mark_changes([stepped, other])] == [[], []]
    longer = trend([100.0, 100.0, 50.0, 50.0])
    others = [trend([100.0] * 4, seed=seed) for seed in range(1, 100)]
    assert changed_at(mark_changes([longer, *others])[0]) == [2]


def test_many_positions_need_more_evidence_than_one():
    """Five launches against five again, but the split was chosen among five positions."""
    noise = random.Random(0)
    points = (point(0, 100.0, noise), *(point(position, 50.0, noise, launches=1) for position in range(1, 6)))
    (marked,) = mark_changes([replace(trend([1.0]), points=points)])
    assert marked.changes == ()


def test_two_launches_settle_nothing_however_far_they_are_apart():
    assert mark_changes([trend([100.0, 1.0], launches=2)])[0].changes == ()


def test_what_differs_within_a_commit_is_drift_and_hides_no_larger_change():
    drifting = trend([100.0] * 3 + [90.0] * 3 + [86.0] * 3 + [60.0] * 3)
    within = replace(
        drifting,
        points=tuple(replace(point, commit=commit) for point, commit in zip(drifting.points, "aaaaaabbbccc", strict=True)),
    )
    assert changed_at(mark_changes([drifting])[0]) == [3, 6, 9]
    (marked,) = mark_changes([within])
    assert [(change.index, change.is_drift) for change in marked.changes] == [(3, True), (9, False)]
    edited = replace(within, points=tuple(replace(point, dirty=True) for point in within.points))
    assert not any(change.is_drift for change in mark_changes([edited])[0].changes)


def test_a_single_run_that_was_disturbed_is_no_change():
    (marked,) = mark_changes([trend([100.0] * 5 + [80.0] + [100.0] * 5, launches=3)])
    assert marked.changes == ()


def test_peaks_change_with_their_value_and_say_what_else_differs():
    peaks = trend([100.0, 100.0, 110.0], metric="peak_allocated_bytes")
    exact = [
        replace(entry, value=value, launches=(value,)) for entry, value in zip(peaks.points, (100.0, 100.5, 110.0), strict=True)
    ]
    exact[2] = replace(exact[2], environment=ENVIRONMENT | {"torch": "2.13"}, steps=8)
    (marked,) = mark_changes([replace(peaks, points=tuple(exact))])
    (change,) = marked.changes
    assert (change.index, change.is_worse, change.ratio) == (2, True, pytest.approx(1.1))
    assert change.differences[-1] == "8 measured steps against 5"
    assert any("torch" in text for text in change.differences)


@pytest.mark.parametrize(
    ("launches", "changed"),
    [((100.0, 104.0), []), ((104.0, 103.0), [1]), ((104.0,), []), ((107.0,), [1]), ((100.0, 107.0), [1])],
)
def test_a_peak_that_chance_raised_in_a_launch_is_no_change(launches, changed):
    peaks = trend([100.0, 100.0], metric="peak_allocated_bytes")
    before, after = (
        replace(entry, value=max(values), launches=values)
        for entry, values in zip(peaks.points, ((100.0, 100.0), launches), strict=True)
    )
    (marked,) = mark_changes([replace(peaks, points=(before, after))])
    assert changed_at(marked) == changed


@pytest.mark.parametrize(
    ("levels", "changed"), [([100, 100, 104, 104], [2]), ([100, 104, 100, 100], []), ([100, 100, 104], [])]
)
def test_a_small_change_of_a_peak_that_lasts_is_marked_though_each_run_has_one_launch(levels, changed):
    peaks = trend([float(level) for level in levels], metric="peak_allocated_bytes")
    exact = [replace(entry, value=level, launches=(level,)) for entry, level in zip(peaks.points, levels, strict=True)]
    (marked,) = mark_changes([replace(peaks, points=tuple(exact))])
    assert changed_at(marked) == changed


@pytest.mark.parametrize(
    ("metric", "levels"), [("updates_lost", (0.0, 0.0, 0.46, 0.46)), ("peak_allocated_bytes", (0.0, 0.0, 5.0, 5.0))]
)
def test_a_value_without_noise_that_leaves_zero_has_changed(metric, levels):
    marked = trend([1.0] * 4, metric=metric)
    exact = tuple(replace(entry, value=value, launches=(value,)) for entry, value in zip(marked.points, levels, strict=True))
    (change,) = mark_changes([replace(marked, points=exact)])[0].changes
    assert (change.index, change.is_worse, change.ratio, change.size) == (2, True, None, math.inf)


def test_points_are_in_the_order_of_commits_and_by_time_where_a_commit_is_unknown():
    noise = random.Random(0)
    late, early = point(1, 1.0, noise, commit="b"), point(5, 1.0, noise, commit="a")
    assert order_points([late, early], {"a": 0, "b": 1}) == [early, late]
    assert order_points([early, late], {"a": 0}) == [late, early]


@pytest.mark.parametrize(
    ("ratio", "low", "high", "agree"), [(1.03, 0.7, 0.98, False), (0.97, 1.02, 1.3, False), (1.03, 1.01, 1.2, True)]
)
def test_a_split_whose_median_contradicts_its_test_is_no_change(ratio, low, high, agree, monkeypatch):
    """Launches of two kinds have a mean on one side of 1 and a median on the other."""
    stepped = trend([100.0] * 3 + [50.0] * 3)
    (proposal,) = (proposal for proposal in trends._propose(stepped.points, 0, 6) if proposal.end - proposal.start == 6)
    shown = replace(proposal, ratio=ratio, low=low, high=high)
    monkeypatch.setattr(trends, "_propose", lambda *_: [shown])
    assert bool(mark_changes([stepped], relevant=0.01)[0].changes) is agree


def test_runs_without_launches_show_no_change():
    """Baselines of earlier versions have none."""
    stepped = trend([100.0] * 3 + [50.0] * 3)
    older = replace(stepped, points=tuple(replace(entry, launches=()) for entry in stepped.points))
    assert changed_at(mark_changes([stepped])[0]) == [3]
    assert mark_changes([older])[0].changes == ()


def test_a_change_among_runs_with_launches_is_found_beside_older_ones_without():
    """The larger step, from the older baselines, cannot be tested."""
    levels = trend([300.0] * 2 + [80.0] * 3 + [70.0] * 3)
    points = [replace(entry, launches=()) if index < 2 else entry for index, entry in enumerate(levels.points)]
    assert changed_at(mark_changes([replace(levels, points=tuple(points))])[0]) == [5]
