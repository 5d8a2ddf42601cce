"""An example baseline, and launches of a run that is compared with it. No number was measured."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

from benchbox.analysis.baseline import make_baseline
from benchbox.analysis.summary import summarize
from tests.support.example_run import CELL, MEASURE, example_record, example_run, steady_records

if TYPE_CHECKING:
    from benchbox.store.baseline import Baseline

COMPLETE = [example_record(launch=1), example_record(launch=2)]
STEP_S = median(median(record["step_time_s"]["slowest"]) for record in COMPLETE)


def example_baseline() -> Baseline:
    """Return a baseline of five launches, measured a day before."""
    run = example_run([CELL], measure=asdict(MEASURE) | {"launches": 5})
    return make_baseline(run, summarize(run, steady_records(step_s=STEP_S, started="2025-12-31")), "example")
