"""Metrics that another package adds through the entry-point group `benchbox.metrics`."""

from __future__ import annotations

import sys

import pytest

from benchbox.analysis.gate import gate
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.summary import summarize
from benchbox.errors import ConfigurationError
from benchbox.registry.metrics import BUILT_IN_METRICS, Metric, metric_by_name, metrics
from benchbox.report.view import build_report
from benchbox.spec.schema import ThresholdFile
from benchbox.store.table import launch_table
from tests.support.distributions import write_distribution
from tests.support.example_run import CELL, example_record, example_run

MODULE = """
from benchbox.registry.metrics import Metric

duration = Metric(
    name="duration_s", unit="s", direction="lower", formula="seconds of the launch, start to end",
    read=lambda record: record["duration_s"],
)
kernel = Metric(
    name="kernel", unit="text", direction="none", formula="the attention kernel",
    read=lambda record: record["observed"] and record["observed"]["attention_kernel"],
)
taken = Metric(name="mfu", unit="fraction", direction="higher", formula="", read=lambda record: None)
number = 3
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes a package importable, as pip would install it, with the given entry points."""

    def install(**targets):
        (tmp_path / "thirdparty_metrics.py").write_text(MODULE)
        entries = {name: f"thirdparty_metrics:{target}" for name, target in targets.items()}
        write_distribution(tmp_path, "thirdparty-metrics", "benchbox.metrics", entries)
        monkeypatch.syspath_prepend(tmp_path)
        metrics.cache_clear()

    yield install
    sys.modules.pop("thirdparty_metrics", None)
    metrics.cache_clear()


def test_an_installed_metric_is_in_the_list_in_thresholds_in_the_gate_the_table_and_the_report(install):
    install(one="duration", two="kernel")
    assert list(metrics()) == [*BUILT_IN_METRICS, "duration_s", "kernel"]
    assert isinstance(metric_by_name("duration_s"), Metric)

    ThresholdFile(metric="duration_s", max=4.0)
    thresholds = [{"metric": "duration_s", "max": 4.0}, {"metric": "kernel", "expect": "sdpa:flash_cpu"}]
    run = example_run([CELL], thresholds=thresholds)
    records = [example_record(launch=launch) for launch in (1, 2)]
    rows = gate(run, summarize(run, records), BaselineLookup(None, None))
    assert [(row.metric, row.actual, row.verdict) for row in rows[1:]] == [
        ("duration_s", "14.20 s", "breach"),
        ("kernel", "sdpa:flash_cpu", "ok"),
    ]

    assert launch_table(records)["duration_s"].tolist() == [14.2, 14.2]
    report = build_report(run, records)
    shown = {column.name: value.text for column, value in zip(report.table.columns, report.table.rows[0], strict=True)}
    assert (shown["duration_s"], shown["kernel"]) == ("14.2 s", "sdpa:flash_cpu")
    assert ("duration_s", "seconds of the launch, start to end") in [(row.name, row.formula) for row in report.method]


def test_a_number_that_no_launch_has_gets_no_column(install):
    install(one="duration")
    record = example_record(status="crash")
    columns = build_report(example_run([CELL]), [record]).table.columns
    assert "duration_s" not in [column.name for column in columns]


def test_a_name_that_is_taken_is_an_error_that_names_the_entry_point_and_the_remedy(install):
    install(wrong="taken")
    with pytest.raises(ConfigurationError) as caught:
        metrics()
    assert str(caught.value) == (
        "thirdparty-metrics, entry point benchbox.metrics: wrong: thirdparty_metrics:taken takes the name 'mfu', "
        "which belongs to benchbox itself; update or repair thirdparty-metrics, or pip uninstall it"
    )


def test_an_entry_point_that_is_no_metric_is_an_error(install):
    install(wrong="number")
    with pytest.raises(ConfigurationError, match=r"is an object of int, not a benchbox\.registry\.metrics\.Metric"):
        metrics()


def test_an_unknown_metric_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigurationError, match="unknown metric 'step_time'; did you mean 'step_time_s'"):
        metric_by_name("step_time")
