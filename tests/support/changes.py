"""Figures of two runs whose launches take a steady time, and the change between them."""

from __future__ import annotations

from dataclasses import asdict

from benchbox.analysis.changes import compare_runs
from benchbox.analysis.figures import figures_of_run
from tests.support.example_run import CELL, MEASURE, example_run, steady_records

STEP_S = 0.2
THROUGHPUT = ("global_samples_per_s",)


def figures(records, *, cells=(CELL,), name="head"):
    """Return the figures of a run of these records."""
    return figures_of_run(name, example_run(list(cells), measure=asdict(MEASURE) | {"launches": 5}), records)


BASE = figures(steady_records(step_s=STEP_S, started="2025-12-31"), name="base")


def compared(records, metrics=THROUGHPUT, base=BASE, **options):
    """Return the one change of a metric from `base` to a run of these records."""
    (change,) = compare_runs(base, figures(records), metric_names=metrics, **options).changes
    return change
