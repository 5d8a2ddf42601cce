"""Runs whose launches are not comparable: other machines, versions, steps or threads."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchbox.analysis.baseline import make_baseline
from benchbox.analysis.changes import compare_runs
from benchbox.analysis.figures import figures_of_baseline, figures_of_run
from benchbox.analysis.summary import summarize
from benchbox.errors import ConfigurationError
from tests.support.changes import BASE, STEP_S, THROUGHPUT, compared, figures
from tests.support.example_run import CELL, MEASURE, example_run, steady_records


def with_environment(**changes):
    return [record | {"environment": record["environment"] | changes} for record in steady_records(step_s=STEP_S * 1.5)]


@pytest.mark.parametrize("key", ["machine", "torch"])
def test_runs_of_other_machines_or_versions_are_incomparable_unless_that_is_what_varies(key):
    records = with_environment(**{key: "another"})
    change = compared(records)
    assert change.verdict == "incomparable"
    assert f"--vary {key} compares nevertheless" in change.reason
    assert compared(records, vary=[key]).verdict == "regression"


def test_another_version_of_the_policy_is_what_is_compared():
    records = [
        record | {"environment": record["environment"] | {"policy_sha256": "1" * 64}}
        for record in steady_records(step_s=STEP_S)
    ]
    assert compared(records).verdict == "neutral"


def test_a_run_is_not_compared_with_itself():
    change = compared(steady_records(step_s=STEP_S, started="2025-12-31"))
    assert (change.verdict, change.reason) == ("incomparable", "5 launches are in both: a run is not compared with itself")


@pytest.mark.parametrize(
    ("changed", "reason"), [({"steps": 8}, "4 measured steps against 8"), ({"warmup_steps": 7}, "1 warm-up steps against 7")]
)
def test_runs_of_other_numbers_of_steps_are_incomparable(changed, reason):
    """The last loss is that after both, and the same training has another one."""
    longer = replace(figures(steady_records(step_s=STEP_S)), measure=asdict(MEASURE) | changed)
    for metric in (THROUGHPUT, ("final_loss",)):
        (change,) = compare_runs(BASE, longer, metric_names=metric).changes
        assert (change.verdict, change.reason) == ("incomparable", reason)


def half_with(records, **changes):
    """The records, the first three of which were measured with another environment."""
    return [record | {"environment": record["environment"] | (changes if record["launch"] < 4 else {})} for record in records]


@pytest.mark.parametrize("key", ["torch", "launcher"])
@pytest.mark.parametrize("side", ["base", "head"])
def test_a_run_whose_launches_differ_in_their_environment_is_incomparable_whatever_its_latest_launch_says(side, key):
    """It was resumed after an upgrade, or by another launcher."""
    base, head = (
        [record | {"environment": record["environment"] | {key: "2.0"}} for record in records]
        for records in (steady_records(step_s=STEP_S, started="2025-12-31"), steady_records(step_s=STEP_S * 1.5))
    )
    base, head = (
        half_with(records, **{key: "1.0"}) if side == name else records for name, records in (("base", base), ("head", head))
    )
    sides = figures(base, name="base"), figures(head)
    (change,) = compare_runs(*sides, metric_names=THROUGHPUT).changes
    assert change.verdict == "incomparable"
    differing = f"{key} (launches of {side} differ in {key}: 1.0, 2.0)"
    assert change.reason == f"they also differ in {differing} (--vary {key} compares nevertheless)"
    (varied,) = compare_runs(*sides, metric_names=THROUGHPUT, vary=[key]).changes
    assert varied.verdict == "regression"


def test_a_key_that_may_vary_and_does_not_exist_is_refused():
    sides = figures(steady_records(step_s=STEP_S, started="2025-12-31")), figures(steady_records(step_s=STEP_S))
    with pytest.raises(ConfigurationError, match="--vary torhc: no such key of the environment; did you mean 'torch'"):
        compare_runs(*sides, metric_names=THROUGHPUT, vary=["machine", "torhc"])


def records_with_threads(cell, threads, *, started, **environment):
    """Launches of a cell on a machine that has given each of its ranks so many threads."""
    records = steady_records(cell, step_s=STEP_S, started=started)
    variables = {"OMP_NUM_THREADS": str(threads)}
    return [
        record | {"environment": record["environment"] | {"threads": threads, "variables": variables} | environment}
        for record in records
    ]


ALONE = replace(CELL, backend="single", world_size=1)


@pytest.mark.parametrize("as_baseline", [False, True])
def test_a_run_of_one_cell_is_compared_with_a_run_of_cells_with_other_numbers_of_ranks(as_baseline):
    """Threads of a rank follow from the number of ranks: those of cells with as many ranks are compared."""
    run = example_run([ALONE, CELL], measure=asdict(MEASURE) | {"launches": 5})
    records = [
        record
        for cell, threads in ((ALONE, 2), (CELL, 1))
        for record in records_with_threads(cell, threads, started="2025-12-31")
    ]
    base = figures_of_run("base", run, records)
    if as_baseline:
        base = figures_of_baseline("base", make_baseline(run, summarize(run, records), "machine"))
    same, fewer = (
        compare_runs(
            base,
            figures(records_with_threads(ALONE, threads, started="2026-01-01"), cells=(ALONE,)),
            metric_names=THROUGHPUT,
        ).changes[0]
        for threads in (2, 1)
    )
    assert (same.cell_id, same.verdict, same.reason) == (ALONE.cell_id, "neutral", None)
    assert fewer.verdict == "incomparable"
    assert "threads 1 against 2" in fewer.reason


def test_runs_without_a_common_number_of_ranks_differ_in_their_machines_and_not_in_threads():
    comparison = compare_runs(
        figures(records_with_threads(CELL, 1, started="2025-12-31", machine="another")),
        figures(records_with_threads(ALONE, 2, started="2026-01-01"), cells=(ALONE,)),
    )
    assert [text.split()[0] for text in comparison.differences] == ["machine"]
