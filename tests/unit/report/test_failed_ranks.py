"""The ranks of a stuck group in a report: where each stood, its last collectives and its stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchbox.report.html import render_html
from benchbox.report.markdown import render_markdown
from benchbox.report.rank_positions import describe_positions
from benchbox.report.view import Report, build_report
from tests.support.example_run import CELL, OOM, example_record, example_run

STACK = 'File "policy.py", line 40, in forward\n  return self.head(x)'


def call(sequence: int, operation: str, *, is_done: bool) -> Any:
    values = {"group": "default_pg 0", "ranks": [0, 1], "sequence": sequence, "operation": operation, "is_done": is_done}
    return values | {"dtypes": ["float32"], "shapes": [[72]]}


def position(rank: int, **changes: Any) -> Any:
    values = {"rank": rank, "stage": "measure", "step": 3, "phase": "backward", "collective": None}
    return {**values, "last_collectives": [], "stack": None, "reason": None, **changes}


@pytest.fixture(scope="module")
def report() -> Report:
    waiting = call(8, "all_gather", is_done=False)
    ranks = [
        position(0, collective=waiting, last_collectives=[call(7, "all_reduce", is_done=True), waiting], stack=STACK),
        position(1, phase="forward", reason="the rank was killed"),
    ]
    error = OOM | {"type": "Hang", "message": "no progress for 60 s", "ranks": ranks}
    return build_report(example_run([CELL]), [example_record(status="hang", error=error)])


def test_html_and_markdown_say_where_every_rank_of_a_stuck_group_stood(report: Report) -> None:
    for text in (render_html(report), render_markdown(report).replace("\n    ", "\n")):
        for line in (
            "rank 0: measure, step 3, backward\n  waits in all_gather(float32 [72])",
            "    8 of group default_pg 0: all_gather(float32 [72]), not done\n    7 of group default_pg 0: all_reduce",
            "rank 1: measure, step 3, forward\n  its collectives are unknown: the rank was killed",
            "    File &#34;policy.py&#34;, line 40" if text.startswith("<!") else '    File "policy.py", line 40',
        ):
            assert line in text
    assert "backend=ddp, launch 1, rank 1, backward: hang. The ranks:\n\n    rank 0: " in render_markdown(report)


def test_a_failure_of_one_rank_keeps_its_traceback() -> None:
    report = build_report(example_run([CELL]), [example_record(status="oom", error=OOM)])
    assert [(failure.details, failure.ranks) for failure in report.failures] == [(OOM["traceback"], "")]


def test_batches_beyond_the_memory_limit_are_not_in_the_equivalence_panel() -> None:
    """They were never measured. The panel has the batches that fit, and says nothing of the others."""
    cells = [replace(CELL, batch=batch, backend=backend) for backend in ("ddp", "zero2") for batch in (2, 4)]
    run = example_run(cells)
    walks = [
        {"cells": [cell.cell_id for cell in cells if cell.backend == backend], "at_most": None, "predicted_batch": None,
         "prediction_reason": None, "fastest": None}
        for backend in ("ddp", "zero2")
    ]  # fmt: skip
    records = [example_record(cell) if cell.batch == 2 else example_record(cell, status="oom", error=OOM) for cell in cells]
    panel = build_report(replace(run, walks=walks), records).equivalence
    assert panel is not None
    assert [row.cell for row in panel.rows] == ["backend=ddp batch=2", "backend=zero2 batch=2"]
    assert panel.summary.startswith("2 cells: ")


def test_a_rank_that_waits_in_no_collective_says_so() -> None:
    lines = describe_positions([position(2, step=None, phase=None), position(3, stage=None, step=None, phase=None)])
    assert lines.splitlines() == [
        "rank 2: measure",
        "  waits in no collective",
        "rank 3: its position is unknown",
        "  waits in no collective",
    ]
