"""Tests that a failed observer never counts as a passed audit, in records, reports and subjects."""

from __future__ import annotations

from benchbox.audit.record import build_precision_record
from benchbox.cli.subjects import observer_failure
from benchbox.report.view import build_report
from tests.support.example_run import CELL, OOM, example_record, example_run
from tests.support.facts import rank

TROUBLE = "before: ZeroDivisionError: oops"


def findings_column(record):
    table = build_report(example_run([CELL]), [record]).table
    index = [column.name for column in table.columns].index("findings")
    return table.rows[0][index]


def test_a_record_keeps_failures_of_observers_and_the_report_shows_them():
    record = example_record()
    assert findings_column(record).text == "none"
    record["precision"] = build_precision_record([rank(0), rank(1, problems=(TROUBLE,))])
    assert record["precision"]["problems"] == [f"rank 1: {TROUBLE}"]
    column = findings_column(record)
    assert (column.text, column.remark) == ("observer failed", f"rank 1: {TROUBLE}")


def test_a_cell_without_an_audit_is_not_shown_as_one_without_findings():
    for record in (example_record() | {"precision": None}, example_record(status="oom", error=OOM)):
        column = findings_column(record)
        assert (column.text, column.remark) == ("-", "the precision audit has no census of this cell")


def test_a_subject_whose_observer_failed_has_failed():
    assert observer_failure([rank(0), rank(1)]) is None
    assert observer_failure([rank(0), rank(1, problems=(TROUBLE,))]) == f"the observer stopped watching on rank 1: {TROUBLE}"
