"""Verdicts of predictions, in a report as well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.analysis.reconciliation import reconcile
from benchbox.analysis.summary import summarize
from benchbox.errors import RecordError
from benchbox.report.html import render_html
from benchbox.report.markdown import escape, render_markdown
from benchbox.report.theory import MAX_ROWS, NOTE
from benchbox.report.view import build_report
from benchbox.report.write import write_reports
from benchbox.store.predictions import read_predictions, write_predictions
from tests.support.example_run import CELL, example_record, example_run, write_example

LENGTH = {"count": 2, "bytes": 8}  # as measured: the length of an empty list


@pytest.fixture(scope="module")
def record():
    return example_record(CELL, 1)


def prediction_of(record, **changes):
    """Return a prediction that agrees with a record in everything but the changes."""
    agreeing = {
        "peak_bytes": record["memory"]["worst"]["allocated_peak_bytes"],
        "moment": "backward",
        "components": {"parameters": 10, "activations": 90},
        "resident_bytes": 10,
        "logits_bytes": 0,
        "collectives": record["collectives"],
        "model_flops": 0,
        "recomputed_flops": 0,
        "optimizer_bytes": 0,
        "world_size": 2,
        "total_numel": record["observed"]["total_numel"],
        "notes": [],
    }
    return agreeing | changes


def reconciled(record, **changes):
    (summary,) = summarize(example_run([CELL]), [record])
    return reconcile(prediction_of(record, **changes), summary)


def test_a_prediction_that_agrees_is_confirmed(record):
    memory, communication = reconciled(record)
    assert (memory.verdict, memory.error) == ("confirmed", 0.0)
    assert communication.verdict == "confirmed"


def test_memory_beyond_5_percent_is_refuted_and_says_when_and_by_how_much(record):
    peak = record["memory"]["worst"]["allocated_peak_bytes"]
    assert reconciled(record, peak_bytes=round(peak * 0.951))[0].verdict == "confirmed"
    memory = reconciled(record, peak_bytes=round(peak * 0.949))[0]
    assert memory.verdict == "refuted"
    assert "more than predicted for backward, when most is activations" in memory.residual


@pytest.mark.parametrize(
    ("source", "has_size", "verdict"),
    [
        ("tensor_storage", True, "refuted"),
        ("tensor_storage", False, "incomparable"),
        ("tensor_storage", None, "incomparable"),
        ("torch.cuda", True, "incomparable"),
    ],
)
def test_memory_is_refuted_only_by_a_step_of_the_size_that_is_predicted(record, source, has_size, verdict):
    """Under `padding: longest`. An allocator's peak is that of all measured steps, and older predictions are for the first."""
    memory = record["memory"] | {"source": source}
    varying = record | {"cell": record["cell"] | {"padding": "longest"}, "memory": memory}
    size = {} if has_size is None else {"has_size_of_step": has_size}
    peak = memory["worst"]["allocated_peak_bytes"]
    assert reconciled(varying, peak_bytes=round(peak * 0.951), **size)[0].verdict == "confirmed"
    beyond = reconciled(varying, peak_bytes=round(peak * 0.949), **size)[0]
    assert beyond.verdict == verdict
    assert beyond.residual.endswith("the size of this peak" if verdict == "incomparable" else "no formula has it")


def test_a_step_that_may_have_been_skipped_refutes_nothing(record):
    name, entry = next(iter(record["collectives"].items()))
    cell, fewer = record["cell"], record["collectives"] | {name: entry | {"count": entry["count"] + 1}}
    skipped = record | {"cell": cell | {"optim": cell["optim"] | {"spike": {"action": "skip"}}}}
    larger = round(record["memory"]["worst"]["allocated_peak_bytes"] * 1.06)
    for measured, verdict in ((skipped, "incomparable"), (record, "refuted")):
        entries = reconciled(measured, peak_bytes=larger, collectives=fewer)
        assert [entry.verdict for entry in entries] == [verdict, verdict]
        assert all(("optim.spike may have skipped" in entry.residual) == (verdict == "incomparable") for entry in entries)
    assert [entry.verdict for entry in reconciled(skipped)] == ["confirmed", "confirmed"]


@pytest.mark.parametrize(("source", "verdict"), [("tensor_storage", "refuted"), ("torch.cuda", "incomparable")])
def test_an_allocators_peak_of_frozen_steps_refutes_no_prediction_for_a_later_one(record, source, verdict):
    """Tensors are counted in the step that is predicted."""
    cell, memory = record["cell"], record["memory"] | {"source": source}
    optim = cell["optim"] | {"freeze_backbone_steps": record["warmup_steps"] + 1}
    frozen = record | {"cell": cell | {"optim": optim}, "memory": memory}
    larger = round(memory["worst"]["allocated_peak_bytes"] * 1.06)
    assert reconciled(frozen, peak_bytes=larger)[0].verdict == verdict


def test_only_a_small_difference_is_called_small_tensors(record):
    peak = record["memory"]["worst"]["allocated_peak_bytes"]
    assert "small tensors" in reconciled(record, peak_bytes=peak - 2**14)[0].residual
    assert (
        reconciled(record, peak_bytes=peak - 2**17)[0].residual == "128 KiB more than predicted for backward: no formula has it"
    )


def test_one_call_or_one_byte_too_many_refutes_communication_and_is_named(record):
    name, entry = next(iter(record["collectives"].items()))
    for key, text in (("count", "calls predicted"), ("bytes", "bytes predicted")):
        changed = {**record["collectives"], name: {**entry, key: entry[key] + 1}}
        communication = reconciled(record, collectives=changed)[1]
        assert communication.verdict == "refuted"
        assert communication.residual.startswith(f"{name}: ")
        assert text in communication.residual


@pytest.mark.parametrize(("backend", "is_named"), [("zero3", True), ("ddp", False)])
def test_a_step_of_zero3_without_a_valid_order_of_modules_is_named_as_the_cause(backend, is_named):
    """The ranks compare the order by broadcasts only after such a step; under DDP a broadcast has other causes."""
    cell = replace(CELL, backend=backend)
    record = example_record(cell, 1)
    (summary,) = summarize(example_run([cell]), [record | {"collectives": {**record["collectives"], "broadcast": LENGTH}}])
    peak = record["memory"]["worst"]["allocated_peak_bytes"]
    memory, communication = reconcile(prediction_of(record, peak_bytes=2 * peak), summary)
    for entry in (memory, communication):
        assert entry.verdict == "refuted"
        assert ("no valid record of the order of modules" in entry.residual) == is_named


def test_a_step_of_zero3_with_the_predicted_collectives_is_confirmed():
    cell = replace(CELL, backend="zero3")
    record = example_record(cell, 1)
    (summary,) = summarize(example_run([cell]), [record])
    assert [entry.verdict for entry in reconcile(prediction_of(record), summary)] == ["confirmed", "confirmed"]


def test_a_policy_that_has_changed_since_is_not_compared(record):
    for entry in reconciled(record, total_numel=5):
        assert entry.verdict == "incomparable"
        assert "and it has 5 now" in entry.residual


def test_a_cell_without_an_ok_launch_is_not_measured(record):
    (summary,) = summarize(example_run([CELL]), [])
    assert {entry.verdict for entry in reconcile(prediction_of(record), summary)} == {"not measured"}


def test_a_report_shows_predictions_in_columns_and_a_section(record):
    run, predictions = example_run([CELL]), {CELL.cell_id: prediction_of(record, peak_bytes=1)}
    report = build_report(run, [record], predictions=predictions)
    ((*_, peak, communication),) = report.table.rows
    assert [column.name for column in report.table.columns][-2:] == ["predicted peak", "predicted communication"]
    assert (peak.line, communication.line) == ("1 B (-100.0%, refuted)", "15.6 KiB (+0.0%, confirmed)")
    assert report.theory is not None
    assert "refuted" in render_markdown(report).partition("## Theory")[2]
    assert build_report(run, [record]).theory is None


def test_of_many_predictions_the_section_has_first_those_that_fail_and_then_the_largest_errors(record):
    cells = [replace(CELL, seed=seed) for seed in range(MAX_ROWS)]
    records = [record | {"cell_id": cell.cell_id, "cell": cell.to_dict(), "config": cell.to_dict()} for cell in cells]
    peak = record["memory"]["worst"]["allocated_peak_bytes"]
    peaks = [peak] * (MAX_ROWS - 2) + [round(peak * 1.02), 2 * peak]
    predictions = {
        cell.cell_id: prediction_of(record, peak_bytes=bytes_) for cell, bytes_ in zip(cells[1:], peaks[1:], strict=True)
    }
    section = build_report(
        example_run(cells), records, predictions=predictions, unpredicted={cells[0].cell_id: "no formula for it"}
    ).theory
    assert section is not None
    assert len(section.rows) == MAX_ROWS
    assert [row[5] for row in section.rows] == ["not predicted", "refuted"] + ["confirmed"] * (MAX_ROWS - 2)
    assert section.rows[2][1:6] == ("peak memory", "163.2 MiB", "160.0 MiB", "+2.00%", "confirmed")
    assert section.left_out.startswith(f"Of {2 * MAX_ROWS - 1} rows, {MAX_ROWS} are shown")
    assert f"peak memory confirmed: {MAX_ROWS - 2}" in section.counts


def test_a_cell_without_a_prediction_has_the_reason_in_its_row(record):
    report = build_report(example_run([CELL]), [record], unpredicted={CELL.cell_id: "no formula for it"})
    ((_, *values),) = report.theory.rows
    assert values == ["all", "-", "-", "-", "not predicted", "no formula for it"]


def test_a_section_without_verdicts_counts_none(record):
    report = build_report(example_run([CELL]), [record], unpredicted={CELL.cell_id: "no formula for it"})
    lines = render_markdown(report).splitlines()
    assert lines[lines.index("## Theory") + 2] == escape(NOTE)
    assert f"<p>{NOTE}</p>" in render_html(report)


def test_published_runs_keep_their_predictions(tmp_path, record):
    store = write_example(tmp_path / "run")
    write_predictions(store.path, dict.fromkeys(store.run().cells, prediction_of(record)), {})
    paths = write_reports(store.path, tmp_path / "published", pack=True)
    assert read_predictions(tmp_path / "published") == read_predictions(store.path) != {}
    assert 'id="theory"' in paths.html.read_text()


def test_a_damaged_file_of_predictions_is_refused_with_its_name(tmp_path):
    (tmp_path / "predictions.json").write_text('{"schema_version": 1, "predictions": 3}')
    with pytest.raises(RecordError, match=r"predictions\.json: not what benchbox writes"):
        read_predictions(tmp_path)


def test_on_a_gpu_the_allocator_explains_what_is_left_and_what_it_reserves_is_named():
    record = example_record(CELL, 1, cuda=True)
    peak = record["memory"]["worst"]["allocated_peak_bytes"]
    residual = "1.00 MiB more: the allocator's rounding, and workspaces of libraries"
    memory = reconciled(record, peak_bytes=peak - 2**20)[0]
    assert (memory.verdict, memory.residual) == (
        "confirmed",
        f"{residual}; the allocator reserves 20.0 MiB more than it gives out",
    )
    assert reconciled(record, peak_bytes=peak + 2**20)[0].residual.startswith(residual.replace("more", "less"))


def test_an_error_relative_to_nothing_is_unknown(record):
    silent = record | {"collectives": {}}
    (none, some) = (reconciled(silent, collectives=collectives)[1] for collectives in ({}, record["collectives"]))
    assert (none.measured, none.verdict, none.error) == (0, "confirmed", 0.0)
    assert (some.verdict, some.error) == ("refuted", None)
