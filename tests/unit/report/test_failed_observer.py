"""An observer that failed has passed nothing, wherever that is shown."""

from __future__ import annotations

from benchbox.audit.record import build_precision_record
from benchbox.cli.subjects import observer_failure
from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run
from tests.support.facts import rank

TROUBLE = "before: ZeroDivisionError: oops"


def findings_column(record):
    table = build_report(example_run([CELL]), [record]).table
    place = [column.name for column in table.columns].index("findings")
    return table.rows[0][place]


def test_a_record_keeps_what_observers_failed_at_and_the_report_does_not_call_it_none():
    record = example_record()
    assert findings_column(record).text == "none"
    record["precision"] = build_precision_record([rank(0), rank(1, problems=(TROUBLE,))])
    assert record["precision"]["problems"] == [f"rank 1: {TROUBLE}"]
    shown = findings_column(record)
    assert (shown.text, shown.remark) == ("observer failed", f"rank 1: {TROUBLE}")


def test_a_subject_whose_observer_stumbled_failed():
    assert observer_failure([rank(0), rank(1)]) is None
    assert observer_failure([rank(0), rank(1, problems=(TROUBLE,))]) == f"the observer stopped watching on rank 1: {TROUBLE}"
