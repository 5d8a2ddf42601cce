"""Statements of the method section about launches, rounds and the figures over them."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import combinations_with_replacement
from statistics import median

from benchbox.report.view import build_report
from tests.support.example_run import CELL, MEASURE, example_record, example_run, steady_records

FSDP, ZERO = replace(CELL, backend="fsdp1_full"), replace(CELL, backend="zero2")


def test_the_method_section_says_how_often_and_in_which_order_cells_were_launched():
    cells = (FSDP, ZERO)
    measure = asdict(MEASURE) | {"launches": 5}
    ran = {cell: steady_records(cell, step_s=0.2, launches=5) for cell in cells}

    def sampling(*records):
        return build_report(example_run(list(cells), measure=measure), records).sampling

    all_five = sampling(*ran[FSDP], *ran[ZERO])
    assert all_five.startswith("Every cell was launched 5 times, each a fresh process group, cells interleaved. ")
    first = sampling(ran[FSDP][0], ran[ZERO][0])
    assert first.startswith("Every cell was launched 1 time, of 5 planned, each a fresh process group. ")
    part = sampling(*ran[FSDP], *ran[ZERO][:2])
    assert part.startswith("Every cell was launched 2 to 5 times, of 5 planned, each a fresh process group, cells inter")
    later = [record | {"started_at": record["started_at"].replace("2026-01-01", "2026-01-02")} for record in ran[ZERO]]
    assert sampling(*ran[FSDP], *later).startswith("Every cell was launched 5 times, each a fresh process group. ")


def test_the_method_section_says_of_what_a_ratio_is_the_median_of_few_rounds_and_of_ten():
    """The machine changes from one round to the next by more than the cells differ."""
    machine, factors = (1.0, 1.0, 1.1, 1.5, 2.2, 0.7, 3.0, 3.1, 0.2, 1.4), (1.1, 1.3, 1.2, 1.4, 1.1, 1.1, 1.5, 1.1, 1.2, 1.6)

    def report_of_rounds(rounds):
        steps = {
            ZERO: machine[:rounds],
            FSDP: [step_s / factor for step_s, factor in zip(machine, factors, strict=True)][:rounds],
        }
        records = [
            example_record(cell, launch, step_s=step_s) | {"started_at": f"2026-01-01T00:{launch:02}:00+00:00"}
            for cell, values in steps.items()
            for launch, step_s in enumerate(values, start=1)
        ]
        return build_report(example_run([FSDP, ZERO], measure=asdict(MEASURE) | {"launches": rounds}), records)

    speeds = [factor / step_s for step_s, factor in zip(machine[:9], factors[:9], strict=True)]
    of_launches = median(reference * speed for reference in machine[:9] for speed in speeds)
    pairs = combinations_with_replacement(factors, 2)
    of_rounds = median(math.sqrt(first * second) for first, second in pairs)
    few, many = report_of_rounds(9), report_of_rounds(10)
    assert few.headline.cards[0].ratio == f"{of_launches:.2f}x"
    assert many.headline.cards[0].ratio == f"{of_rounds:.2f}x"
    expected = "with ten rounds or more for one pair the median of the mean ratios of all pairs of rounds"
    assert expected in many.sampling
    assert "of a peak the highest" in many.sampling


def test_a_run_without_launches_says_that_none_was_made():
    planned = build_report(example_run([CELL, ZERO]), [])
    skipped = build_report(example_run([]), [])
    for report in (planned, skipped):
        assert report.sampling.startswith(
            "No cell was launched. A launch is a fresh process group that would have run 1 warm-up"
        )
