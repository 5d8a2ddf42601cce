"""Two runs of the same cells: what became better or worse, and what cannot be said."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median

import pytest

from benchbox.analysis.baseline import make_baseline, slug
from benchbox.analysis.changes import compare_runs
from benchbox.analysis.figures import figures_of_baseline, figures_of_run
from benchbox.analysis.sides import Side, compare_sides
from benchbox.analysis.summary import summarize
from benchbox.errors import ConfigurationError
from benchbox.registry.metrics import metric_by_name, metrics
from benchbox.store.noise import Noise, NoiseRun, write_noise
from tests.support.changes import BASE, STEP_S, THROUGHPUT, compared, figures
from tests.support.example_run import CELL, MEASURE, OOM, example_record, example_run, steady_records


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.05, "regression"), (0.95, "improvement"), (1.0, "neutral"), (1.01, "neutral")]
)
@pytest.mark.parametrize("metric", ["global_samples_per_s", "step_time_s"])
def test_a_time_is_compared_launch_against_launch_and_the_ratio_is_head_over_base(factor, verdict, metric):
    change = compared(steady_records(step_s=STEP_S * factor), (metric,))
    assert (change.verdict, change.launches) == (verdict, (5, 5))
    expected = factor if metric == "step_time_s" else 1 / factor
    assert change.ratio == pytest.approx(expected, rel=2e-3)
    assert change.low < change.ratio < change.high
    assert change.head / change.base == pytest.approx(expected, rel=2e-3)


def test_too_few_launches_are_no_verdict_and_the_reason_says_how_many_are_needed():
    change = compared(steady_records(step_s=STEP_S * 3, launches=2))
    assert (change.verdict, change.reason) == ("inconclusive", "5 and 2 launches cannot settle it: 5 on each side can")


def test_a_side_of_many_launches_makes_up_for_few_of_the_other():
    """Four against twelve can settle a difference, so that more of them are not what is missing."""
    base = figures(steady_records(step_s=STEP_S, launches=12, started="2025-12-31"), name="base")
    change = compared(steady_records(step_s=STEP_S * 1.0195, launches=4), base=base)
    assert (change.launches, change.verdict, change.reason) == ((12, 4), "inconclusive", None)


def test_figures_without_noise_do_not_count_among_those_that_are_tested():
    """Five launches show that one figure has not changed, and not two."""
    changes = compare_runs(BASE, figures(steady_records(step_s=STEP_S))).changes
    assert {change.metric: change.verdict for change in changes}["global_samples_per_s"] == "neutral"
    assert len(changes) > 3


def test_many_pairs_are_corrected_for_their_number():
    """Five launches settle one pair of cells, and not two: 2 / C(10, 5) is above 1% / 2."""
    cells = [CELL, replace(CELL, batch=3)]

    def side(factor, day):
        records = [record for cell in cells for record in steady_records(cell, step_s=factor * STEP_S, started=day)]
        return figures(records, cells=cells)

    comparison = compare_runs(side(1, "2025-12-31"), side(1.1, "2026-01-01"), metric_names=THROUGHPUT)
    assert [change.verdict for change in comparison.changes] == ["inconclusive", "inconclusive"]
    assert comparison.needed == 6


def test_a_metric_that_is_named_twice_is_tested_once():
    """Five launches settle one pair, and not two."""
    assert compared(steady_records(step_s=STEP_S * 1.1), (*THROUGHPUT, *THROUGHPUT)).verdict == "regression"


def test_a_difference_within_the_noise_floor_of_the_machine_is_not_settled():
    noise = Noise(sigma=0.05, launches=10, ratio=1.0, cell="c", measured_at="2026-01-01", benchbox_version="0.1.0")
    change = compared(steady_records(step_s=STEP_S * 1.05), noise=noise)
    assert change.verdict == "inconclusive"
    assert change.reason == "it is within the noise floor of this machine, 20.0%"
    assert compared(steady_records(step_s=STEP_S * 1.5), noise=noise).verdict == "regression"
    head = figures(steady_records(step_s=STEP_S * 1.15, launches=12))
    (change,) = compare_runs(BASE, head, metric_names=THROUGHPUT, noise=noise).changes
    assert (change.launches, change.verdict) == ((5, 12), "inconclusive"), "the floor is that of the fewer launches"


def test_a_noise_floor_of_step_times_says_nothing_of_other_times(monkeypatch):
    """Such as that of compilation."""
    noise = Noise(sigma=0.05, launches=10, ratio=1.0, cell="c", measured_at="2026-01-01", benchbox_version="0.1.0")
    times = replace(metric_by_name("step_time_s"), name="compile_time_s")
    monkeypatch.setitem(metrics(), "compile_time_s", times)
    base = figures(steady_records(step_s=STEP_S, started="2025-12-31"), name="base")
    change = compared(steady_records(step_s=STEP_S * 1.05), ("compile_time_s",), base, noise=noise)
    assert change.verdict == "regression"


@pytest.mark.parametrize(
    ("setup", "is_used"),
    [({}, True), ({"torch": "1.0"}, False), ({"steps": 77}, False), ({"threads": 64}, True), ({"cell": "another"}, True)],
)
def test_a_noise_floor_of_another_set_up_is_not_used(setup, is_used, tmp_path, monkeypatch):
    """Threads follow from the ranks of the cell that was launched again and again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    steps = {"steps": MEASURE.steps, "warm-up steps": MEASURE.warmup_steps}
    run = NoiseRun(started_at="2026-01-01", launches=12, mean=0.0, sigma=0.05, setup=steps | {"torch": "2.13.0"} | setup)
    noise = Noise(sigma=0.05, launches=12, ratio=1.0, cell="c", measured_at="2026-01-01", benchbox_version="0.1.0", runs=(run,))
    head = figures(steady_records(step_s=STEP_S * 1.05))
    write_noise(slug(str(head.environment["machine"])), head.matrix, noise)
    comparison = compare_sides(Side(name="base", figures=BASE), Side(name="head", figures=head), metric_names=THROUGHPUT)
    assert (comparison.noise is not None) == is_used
    assert comparison.changes[0].verdict == ("inconclusive" if is_used else "regression")


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "regression"), (0.9, "improvement"), (1.01, "neutral")])
def test_a_peak_is_compared_by_value_and_two_launches_suffice(factor, verdict):
    records = steady_records(step_s=STEP_S, launches=2)
    for record in records:
        record["memory"]["worst"]["allocated_peak_bytes"] *= factor
    change = compared(records, ("peak_allocated_bytes",))
    assert (change.verdict, change.ratio) == (verdict, pytest.approx(factor))


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        ((1, 1, 1), (1, 1.04, 1), "inconclusive"),  # chance raised the peak of one launch
        ((1, 1.04, 1), (1, 1, 1), "inconclusive"),
        ((1, 1), (1.04, 1.03), "regression"),
        ((1.04, 1.03), (1, 1), "improvement"),
        ((1,), (1.04,), "inconclusive"),  # or of the only one
        ((1,), (1.04, 1.03), "inconclusive"),
        ((1,), (1.07,), "regression"),  # more than chance does
        ((1, 1, 1), (1, 1.07, 1), "regression"),
        ((1.03, 1), (1, 1.04), "neutral"),
    ],
)
def test_a_peak_has_changed_only_by_more_than_chance_raises_that_of_a_launch(base, head, verdict):
    sides = []
    for factors, day in ((base, "2025-12-31"), (head, "2026-01-01")):
        records = steady_records(step_s=STEP_S, launches=len(factors), started=day)
        for record, factor in zip(records, factors, strict=True):
            record["memory"]["worst"]["allocated_peak_bytes"] *= factor
        sides.append(figures_of_run(day, example_run([CELL], measure=asdict(MEASURE) | {"launches": len(factors)}), records))
    (change,) = compare_runs(*sides, metric_names=("peak_allocated_bytes",)).changes
    assert change.verdict == verdict
    assert (change.reason is not None) == (verdict == "inconclusive")


def test_launches_of_which_one_has_no_throughput_settle_nothing():
    records = steady_records(step_s=2 * STEP_S)
    records[0]["throughput"]["global_samples_per_s"] = 0.0
    change = compared(records, ("global_samples_per_s",))
    assert (change.verdict, change.reason) == (
        "inconclusive",
        "launches are tested by the ratios of their values, and one is not above zero",
    )


@pytest.mark.parametrize(("lost", "verdict"), [(0.0001, "neutral"), (0.5, "regression")])
def test_a_share_changes_by_points(lost, verdict):
    """A ratio to zero has no meaning."""
    records = steady_records(step_s=STEP_S)
    for record in records:
        record["precision"]["numbers"]["updates_lost"] = lost
    change = compared(records, ("updates_lost",))
    assert (change.verdict, change.ratio) == (verdict, None)


def test_precision_is_compared_by_value_and_two_launches_suffice():
    records = steady_records(step_s=STEP_S, launches=2)
    for record in records:
        record["precision"]["numbers"]["edq"] = 0.5
    assert compared(records, ("edq",)).verdict == "regression"


def test_a_loss_may_move_neither_way():
    records = [record | {"loss": [0.2]} for record in steady_records(step_s=STEP_S)]
    assert compared(records, ("final_loss",)).verdict == "regression"


def test_a_cell_that_fails_now_is_a_regression_with_its_error_and_the_reverse_is_an_improvement():
    failed = [example_record(launch=1, status="oom", error=OOM)]
    change = compared(failed)
    assert (change.metric, change.base, change.head, change.verdict) == ("status", "ok", "oom", "regression")
    assert change.reason == "OutOfMemoryError: tried to allocate 2.00 GiB"
    (mended,) = compare_runs(figures(failed), BASE).changes
    assert mended.verdict == "improvement"


def test_a_cell_of_one_side_only_is_missing_and_never_green():
    variant = replace(CELL, batch=3)
    comparison = compare_runs(BASE, figures(steady_records(variant, step_s=STEP_S), cells=[variant]))
    assert [(change.verdict, change.reason) for change in comparison.changes] == [
        ("missing", "base does not have it"),
        ("missing", "head does not have it"),
    ]


def test_a_baseline_has_the_figures_of_its_run():
    run = example_run([CELL], measure=asdict(MEASURE) | {"launches": 5})
    records = steady_records(step_s=STEP_S, started="2025-12-31")
    baseline = figures_of_baseline("base", make_baseline(run, summarize(run, records), "example"))
    slower = steady_records(step_s=STEP_S * 1.1)
    assert compared(slower, base=baseline) == compared(slower)


def test_a_metric_that_is_a_word_is_refused():
    with pytest.raises(ConfigurationError, match="metric status is a word"):
        compare_runs(BASE, BASE, metric_names=["status"])


def test_a_cell_that_fails_otherwise_than_before_is_neither_better_nor_worse():
    crashed = [example_record(launch=1, status="crash", error=OOM)]
    (change,) = compare_runs(figures([example_record(launch=1, status="oom", error=OOM)]), figures(crashed)).changes
    assert (change.base, change.head, change.verdict) == ("oom", "crash", "inconclusive")
    assert change.reason == "OutOfMemoryError: tried to allocate 2.00 GiB"
    (same,) = compare_runs(figures(crashed), figures(crashed)).changes
    assert (same.verdict, same.reason) == ("neutral", None)


def test_a_metric_that_is_named_and_neither_side_has_is_missing():
    """A gate on it would be empty."""
    change = compared(steady_records(step_s=STEP_S), ("mfu",))
    assert (change.metric, change.verdict, change.reason) == ("mfu", "missing", "no cell has a value on either side")


def test_a_metric_that_is_named_and_that_only_some_cells_have_is_compared_in_these():
    """Such as the time of compilation, where `compile` is an axis."""
    other = replace(CELL, backend="zero2")
    sides = []
    for day in ("2025-12-31", "2026-01-01"):
        unknown = [record | {"loss": None} for record in steady_records(other, step_s=STEP_S, started=day)]
        records = [*steady_records(step_s=STEP_S, started=day), *unknown]
        sides.append(figures(records, cells=(CELL, other), name=day))
    (change,) = compare_runs(*sides, metric_names=("final_loss",)).changes
    assert (change.cell_id, change.verdict) == (CELL.cell_id, "neutral")


def test_zero_in_all_launches_is_no_change(monkeypatch):
    monkeypatch.setitem(metrics(), "retries", replace(metric_by_name("step_time_s"), name="retries", read=lambda _: 0.0))
    base = figures(steady_records(step_s=STEP_S, started="2025-12-31"), name="base")
    assert compared(steady_records(step_s=STEP_S), ("retries",), base).verdict == "neutral"


def test_a_figure_that_one_side_lacks_is_missing_and_one_that_both_lack_is_left_out():
    unknown = [record | {"loss": None} for record in steady_records(step_s=STEP_S)]
    lost = compared(unknown, ("final_loss",))
    assert (lost.metric, lost.base, lost.head, lost.verdict) == ("final_loss", 0.4, None, "missing")
    assert lost.reason == "head has no value"
    known = compared(steady_records(step_s=STEP_S), ("final_loss",), base=replace(figures(unknown), started_at=frozenset()))
    assert (known.base, known.head, known.reason) == (None, 0.4, "base has no value")
    both = compare_runs(replace(figures(unknown), started_at=frozenset()), figures(unknown))
    assert "final_loss" not in {change.metric for change in both.changes}


def test_launches_are_not_tested_against_a_baseline_that_has_none():
    (cell,) = BASE.cells.values()
    older = replace(BASE, cells={CELL.cell_id: replace(cell, by_launch={})})
    change = compared(steady_records(step_s=STEP_S * 1.5), base=older)
    assert (change.verdict, change.ratio) == ("missing", None)
    assert change.reason == "a baseline of an earlier version has no values of launches"


def test_two_baselines_without_launches_are_not_compared_by_their_values():
    (cell,) = BASE.cells.values()
    older = replace(BASE, cells={CELL.cell_id: replace(cell, by_launch={})})
    slower = replace(older, started_at=frozenset({"later"}))
    (change,) = compare_runs(older, slower, metric_names=THROUGHPUT).changes
    assert (change.verdict, change.reason) == ("missing", "a baseline of an earlier version has no values of launches")


def changes_of_cells(base, head, **options):
    """Return the changes between two runs without those of the largest batches of walks."""
    return [change for change in compare_runs(base, head, **options).changes if change.metric != "largest batch"]


def figures_of_walk(records, *, name, fastest=True):
    walk = {"cells": [CELL.cell_id], "fastest": CELL.cell_id if fastest else None, "at_most": None, "predicted_batch": None}
    run = example_run([CELL], measure=asdict(MEASURE) | {"launches": 6}, walks=[walk])
    return figures_of_run(name, run, records)


def test_the_launch_that_searched_is_no_part_of_a_comparison_of_walks():
    """It was three times as fast in the base, by chance: it chose the batch."""
    base, head = (steady_records(step_s=STEP_S, launches=6, started=day) for day in ("2025-12-31", "2026-01-01"))
    base[0]["throughput"]["global_samples_per_s"] *= 3
    walks = figures_of_walk(base, name="base")
    (change,) = changes_of_cells(walks, figures_of_walk(head, name="head"), metric_names=THROUGHPUT)
    assert (change.launches, change.verdict) == ((5, 5), "neutral")
    assert change.base == pytest.approx(median(record["throughput"]["global_samples_per_s"] for record in base[1:]))
    (change,) = changes_of_cells(walks, figures(head), metric_names=THROUGHPUT)
    assert change.launches == (5, 5), "of a matrix without walks too, so that both sides have the same rounds"


def test_two_baselines_of_walks_are_compared_without_the_launches_that_searched():
    sides = []
    for day in ("2025-12-31", "2026-01-01"):
        records = steady_records(step_s=STEP_S, launches=6, started=day)
        walk = {"cells": [CELL.cell_id], "fastest": CELL.cell_id, "at_most": CELL.batch, "predicted_batch": None}
        run = example_run([CELL], measure=asdict(MEASURE) | {"launches": 6}, walks=[walk])
        sides.append(figures_of_baseline(day, make_baseline(run, summarize(run, records), "machine")))
    (change,) = changes_of_cells(*sides, metric_names=THROUGHPUT)
    assert change.launches == (5, 5)


def test_launches_that_only_searched_settle_nothing_and_peaks_are_compared_all_the_same():
    base, head = (steady_records(step_s=STEP_S, launches=1, started=day) for day in ("2025-12-31", "2026-01-01"))
    walks = [figures_of_walk(records, name="walk", fastest=False) for records in (base, head)]
    speed, peak = changes_of_cells(*walks, metric_names=("global_samples_per_s", "peak_allocated_bytes"))
    assert (speed.verdict, speed.launches) == ("inconclusive", None)
    assert speed.reason == "launches that only searched for a batch settle nothing: a walk repeats its fastest batch"
    assert (peak.verdict, peak.ratio) == ("neutral", 1)


def test_the_peak_of_a_batch_of_a_walk_is_that_of_all_its_launches():
    base, head = (steady_records(step_s=STEP_S, launches=6, started=day) for day in ("2025-12-31", "2026-01-01"))
    head[0]["memory"]["worst"]["allocated_peak_bytes"] *= 2
    walks = [figures_of_walk(records, name="walk") for records in (base, head)]
    (peak,) = changes_of_cells(*walks, metric_names=("peak_allocated_bytes",))
    assert (peak.verdict, peak.ratio) == ("regression", 2)


def test_a_walk_is_compared_with_a_baseline_that_has_unknown_metrics_or_no_launches():
    base, head = (steady_records(step_s=STEP_S, launches=6, started=day) for day in ("2025-12-31", "2026-01-01"))
    run = example_run([CELL], measure=asdict(MEASURE) | {"launches": 6})
    baseline = make_baseline(run, summarize(run, base), "machine")
    values = baseline.cells[CELL.cell_id]["values"]
    values["their_metric"] = values["global_samples_per_s"]
    walk = figures_of_walk(head, name="head")
    (change,) = changes_of_cells(figures_of_baseline("base", baseline), walk, metric_names=THROUGHPUT)
    assert change.launches == (5, 5)
    values["global_samples_per_s"] = {**values["global_samples_per_s"], "by_launch": {}}
    (change,) = changes_of_cells(figures_of_baseline("base", baseline), walk, metric_names=THROUGHPUT)
    assert (change.verdict, change.reason) == ("missing", "a baseline of an earlier version has no values of launches")
