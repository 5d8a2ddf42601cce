"""Step times beside their lower bounds at measured peaks and links."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from benchbox.analysis.reconciliation import reconcile
from benchbox.analysis.step_bounds import step_bounds
from benchbox.analysis.summary import summarize
from benchbox.cli.app import app
from benchbox.report.html import render_html
from benchbox.report.markdown import render_markdown
from benchbox.report.theory import MAX_ROWS
from benchbox.report.view import build_report
from benchbox.report.write import write_reports
from benchbox.spec.optim import OptimSpec
from benchbox.store.links import write_links
from benchbox.store.peaks import write_peaks
from benchbox.store.predictions import write_predictions
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MEASURE, MIB, example_record, example_run
from tests.support.links import made_up_links
from tests.support.peaks import made_up_peaks, rate
from tests.support.walks import Machine
from tests.unit.analysis.test_reconciliation import prediction_of

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.analysis.reconciliation import Reconciliation
    from benchbox.report.view import Report
    from benchbox.spec.cell import Cell
    from benchbox.store.links import MeasuredLinks
    from benchbox.store.peaks import MeasuredPeaks

GROUP = "2 cpu ranks with 1 thread"
FLOPS, OPTIMIZER_BYTES = 12 * 10**9, 2 * 10**8  # 30 ms at 400 GFLOP/s of bfloat16, and 20 ms at 10 GB/s
PARTS = {"data_wait": 0.01, "compute": 0.7, "core_wait": 0.02, "rank_wait": 0.15, "transfer": 0.12}


def record_of(cell: Cell = CELL, launch: int = 1, **environment: Any) -> Any:
    record: Any = example_record(cell, launch)
    record["environment"] |= {"threads": 1} | environment
    return record


def with_split(record: Any) -> Any:
    """Return the record with the parts of every step, as ranks that are timed at their collectives have."""
    steps = record["step_time_s"]["slowest"]
    return record | {"step_split_s": {part: {"per_rank": [[share * s for s in steps]] * 2} for part, share in PARTS.items()}}


def prediction(record: Any, **changes: Any) -> Any:
    """Return a prediction of 50 ms of computation."""
    work = {"smallest_step_flops": FLOPS, "optimizer_bytes": OPTIMIZER_BYTES}
    by_ranks = {"collectives_by_ranks": {"2": record["collectives"]}}
    return prediction_of(record, **{**({} if record["cell"]["world_size"] == 1 else by_ranks), **work, **changes})


def step_time(
    records: Any,
    *,
    peaks: MeasuredPeaks | None = None,
    links: MeasuredLinks | None = None,
    **changes: Any,
) -> Reconciliation:
    """Return the reconciled step time of a cell."""
    record = records[0]
    (summary,) = summarize(example_run([CELL]), records)
    predicted = prediction(record, **changes)
    bounds = step_bounds(
        {CELL.cell_id: predicted},
        [summary],
        peaks=lambda _: {GROUP: peaks or made_up_peaks()},
        links=lambda _: {} if links is None else {"gloo": links},
    )
    (*_, entry) = reconcile(predicted, summary, bounds.by_cell[CELL.cell_id])
    return entry


def report_of(record: Any, *, peaks: Any = None, links: Any = None, **changes: Any) -> Report:
    predictions = {CELL.cell_id: prediction(record, **changes)}
    return build_report(
        example_run([CELL]),
        [record],
        predictions=predictions,
        peaks=lambda _: peaks or {},
        links=lambda _: links or {},
    )


def rows_of_steps(report: Report) -> list[tuple[str, ...]]:
    assert report.theory is not None
    return [row for row in report.theory.rows if row[1] == "step time"]


def test_a_step_takes_at_least_the_computation_at_the_measured_peaks() -> None:
    """Products in the dtype of the recipe at their highest rate, and the optimizer at the highest rate of memory."""
    records = [record_of(launch=launch) for launch in (1, 2, 3)]
    entry = step_time(records, links=made_up_links(latency_s=1e-6, bytes_per_s=1e9))
    measured = median(median(record["step_time_s"]["slowest"]) for record in records)
    assert entry.predicted == pytest.approx(12e9 / 400e9 + 2e8 / 10e9)
    assert entry.measured == pytest.approx(measured)
    assert entry.error == pytest.approx(0.05 / measured - 1)
    assert (entry.quantity, entry.verdict, entry.unit) == ("step time", "confirmed", "s")


def test_a_step_takes_at_least_its_collectives_on_the_measured_links() -> None:
    """Three all-reduces and two all-gathers of 8004 bytes in all, each a millisecond and its bytes at 100 kB/s."""
    entry = step_time([record_of()], links=made_up_links(bytes_per_s=1e5))
    assert entry.predicted == pytest.approx(5e-3 + 2 * 8004 / 1e5)
    assert entry.residual.startswith("1.3 times the bound of communication: ")


def test_collectives_bound_no_step_that_may_lack_layers_which_communicate() -> None:
    """Steps without optional parts gather fewer parameters; DDP reduces all gradients in every step."""
    slow = made_up_links(bytes_per_s=1e4)
    sharded = report_of(record_of(), peaks={GROUP: made_up_peaks()}, links={"gloo": slow}, model_flops=FLOPS + 1)
    assert [row[2] for row in rows_of_steps(sharded)] == ["50.00 ms"]
    assert sharded.theory is not None
    reason = "steps without optional parts may need fewer collectives than the predicted one"
    assert f"The step time of several ranks is that of computation alone: {reason}." in sharded.theory.note
    reduced = {"2": {"all_reduce": {"count": 3, "bytes": 8004}, "broadcast": {"count": 1, "bytes": 1000}}}
    work = {"model_flops": FLOPS + 1, "collectives": reduced["2"], "collectives_by_ranks": reduced}
    assert "bound of communication" in step_time([record_of()], links=slow, **work).residual


def test_peaks_of_another_torch_bound_no_step() -> None:
    """Its products may be faster or slower."""
    report = report_of(record_of(torch="2.14.0"), peaks={GROUP: made_up_peaks()})
    assert rows_of_steps(report) == []
    assert report.theory is not None
    reason = f"the peaks of {GROUP} are those of torch 2.13.0, and the run of torch 2.14.0: benchbox doctor --peaks"
    assert f"Without a lower bound of the step time: 1 cell ({reason})." in report.theory.note


def test_without_links_the_bound_is_that_of_computation_and_the_note_names_the_command() -> None:
    report = report_of(record_of(), peaks={GROUP: made_up_peaks()})
    assert [row[2] for row in rows_of_steps(report)] == ["50.00 ms"]
    assert report.theory is not None
    sentence = "The step time of several ranks is that of computation alone: benchbox doctor --links measures their links."
    assert sentence in report.theory.note
    linked = report_of(record_of(), peaks={GROUP: made_up_peaks()}, links={"gloo": made_up_links()})
    assert linked.theory is not None
    assert sentence not in linked.theory.note


def test_a_measured_step_below_the_bound_is_refuted() -> None:
    entry = step_time([record_of()], smallest_step_flops=10 * FLOPS)
    assert (entry.verdict, entry.error is not None and entry.error > 0) == ("refuted", True)
    assert entry.residual == (
        "0.68 times the bound of computation: the measured peaks are too low, or a step does less than predicted"
    )
    slow = step_time([record_of()], links=made_up_links(bytes_per_s=1e4))
    assert (slow.verdict, "the measured links are too low" in slow.residual) == ("refuted", True)


def test_a_step_below_the_bound_by_less_than_the_spread_of_the_peaks_is_confirmed() -> None:
    record = record_of()
    measured = median(record["step_time_s"]["slowest"])
    flops = round((1.05 * measured - 0.02) * 400e9)
    assert step_time([record], smallest_step_flops=flops).verdict == "refuted"
    uncertain = replace(made_up_peaks(), update=rate(10e9) | {"spread": 0.06})
    entry = step_time([record], peaks=uncertain, smallest_step_flops=flops)
    assert entry.verdict == "confirmed"
    assert entry.error == pytest.approx(0.05)
    unused = made_up_peaks()
    unused.matmul["float32"]["large"]["spread"] = 0.5
    assert step_time([record], peaks=unused, smallest_step_flops=flops).verdict == "refuted"


def test_a_step_below_the_bound_by_less_than_the_error_of_the_fitted_links_is_confirmed() -> None:
    record = record_of()
    seconds = 1.15 * median(record["step_time_s"]["slowest"])
    links = made_up_links(latency_s=0.0, bytes_per_s=2 * 8004 / seconds)
    assert step_time([record], links=links).verdict == "confirmed"
    slower = made_up_links(latency_s=0.0, bytes_per_s=2 * 8004 / (1.1 * seconds))
    assert step_time([record], links=slower).verdict == "refuted"


def test_the_residual_names_where_the_step_goes() -> None:
    """Parts below 5% are left out; a launch without parts has phases."""
    assert step_time([with_split(record_of())]).residual == (
        "4.3 times the bound of computation: 70% of the step is own work, 15% waiting for other ranks, 12% transfers"
    )
    assert step_time([record_of()]).residual == (
        "4.3 times the bound of computation: 40% of the step is backward, 30% forward, 15% optimizer, 5% data wait, 5% clip"
    )


def test_a_policy_that_has_changed_since_has_no_step_to_compare() -> None:
    entry = step_time([record_of()], total_numel=5)
    assert (entry.verdict, "and it has 5 now" in entry.residual) == ("incomparable", True)


def test_reports_show_the_bound_as_a_row_and_a_column_and_count_it() -> None:
    report = report_of(record_of(), peaks={GROUP: made_up_peaks()}, links={"gloo": made_up_links()})
    ((_, *texts),) = rows_of_steps(report)
    assert texts[:5] == ["step time", "50.00 ms", "217.0 ms", "-76.96%", "confirmed"]
    assert report.theory is not None
    assert "step time confirmed: 1" in report.theory.counts
    assert "The step time is a lower bound" in report.theory.note
    ((*_, step),) = report.table.rows
    assert report.table.columns[-1].name == "predicted step"
    assert step.line == "50.0 ms (-77.0%, confirmed)"
    for text in (render_markdown(report), render_html(report)):
        assert "times the bound of computation" in text


def test_without_peaks_a_report_has_no_row_but_the_command_that_measures_them() -> None:
    report = report_of(record_of())
    assert report.theory is not None
    assert rows_of_steps(report) == []
    assert "predicted step" not in [column.name for column in report.table.columns]
    assert report.theory.note.endswith(
        "Without a lower bound of the step time: 1 cell (the peaks of 2 cpu ranks with 1 thread were not measured: on the "
        "machine of the run, benchbox doctor --peaks --ranks 2 measures them, and --links the links)."
    )
    assert "doctor --peaks" in render_html(report)


def test_peaks_of_other_ranks_do_not_bound_a_step() -> None:
    report = report_of(record_of(), peaks={"4 cpu ranks with 1 thread": made_up_peaks(4)})
    assert rows_of_steps(report) == []


def test_of_cells_without_a_prediction_only_those_that_were_launched_are_named() -> None:
    """Others were left out by --only."""
    launched, other = replace(CELL, seed=5), replace(CELL, seed=6)
    records = [record_of(), example_record(launched)]
    summaries = summarize(example_run([CELL, launched, other]), records)
    bounds = step_bounds(
        {CELL.cell_id: prediction(records[0])}, summaries, peaks=lambda _: {GROUP: made_up_peaks()}, links=None
    )
    assert {cell_id for cell_id, reason in bounds.reasons.items() if reason == "not predicted"} == {launched.cell_id}


def test_a_cell_of_one_rank_needs_no_links() -> None:
    cell = replace(CELL, backend="single", world_size=1)
    record = record_of(cell)
    predictions = {cell.cell_id: prediction(record, world_size=1)}

    def report(peaks: Any) -> Report:
        return build_report(example_run([cell]), [record], predictions=predictions, peaks=lambda _: peaks)

    (row,) = rows_of_steps(report({"1 cpu rank with 1 thread": made_up_peaks(1)}))
    assert row[2] == "50.00 ms"
    bare = report({}).theory
    assert bare is not None
    assert bare.note.endswith("benchbox doctor --peaks --ranks 1 measures them).")


def test_predictions_of_an_older_benchbox_have_no_row() -> None:
    """They do not say among how many ranks collectives run."""
    record = record_of()
    older = prediction(record)
    del older["collectives_by_ranks"]
    report = build_report(
        example_run([CELL]),
        [record],
        predictions={CELL.cell_id: older},
        peaks=lambda _: {GROUP: made_up_peaks()},
        links=lambda _: {"gloo": made_up_links()},
    )
    assert report.theory is not None
    assert [row[1] for row in report.theory.rows] == ["peak memory", "communication"]
    assert "do not say among how many ranks collectives run: `benchbox estimate` of the run" in report.theory.note


def test_keys_of_a_newer_benchbox_in_a_prediction_are_ignored() -> None:
    assert step_time([record_of()], kernels=7).predicted == pytest.approx(0.05)


def test_launches_of_two_machines_have_no_bound() -> None:
    cells = [CELL, replace(CELL, backend="zero2")]
    records = [record_of(cell, machine=machine) for cell, machine in zip(cells, "ab", strict=True)]
    predictions = {cell.cell_id: prediction(record) for cell, record in zip(cells, records, strict=True)}
    report = build_report(example_run(cells), records, predictions=predictions, peaks=lambda _: {GROUP: made_up_peaks()})
    assert rows_of_steps(report) == []
    assert report.theory is not None
    assert "2 cells (the launches of the run name no machine, or several)" in report.theory.note


def test_of_many_rows_confirmed_step_times_are_shown_last() -> None:
    """Each is far from its bound, and would push errors of memory out of the section."""
    cells = [replace(CELL, seed=seed) for seed in range(MAX_ROWS // 2 + 1)]
    records = [record_of(cell) for cell in cells]
    predictions = {cell.cell_id: prediction(record) for cell, record in zip(cells, records, strict=True)}
    section = build_report(
        example_run(cells), records, predictions=predictions, peaks=lambda _: {GROUP: made_up_peaks()}
    ).theory
    assert section is not None
    assert {row[1] for row in section.rows} == {"peak memory", "communication"}
    assert "and step times last" in section.left_out
    assert f"step time confirmed: {len(cells)}" in section.counts


def test_on_a_gpu_products_in_float32_may_run_as_tf32() -> None:
    cell = replace(CELL, recipe="fp32")
    record: Any = example_record(cell, cuda=True)
    record["environment"]["threads"] = 1
    measured = made_up_peaks()
    peaks = replace(measured, device="cuda", matmul={**measured.matmul, "tf32": {"large": rate(300e9)}})
    (summary,) = summarize(example_run([cell]), [record])
    bounds = step_bounds({cell.cell_id: prediction(record)}, [summary], peaks=lambda _: {"2 cuda ranks": peaks}, links=None)
    assert bounds.by_cell[cell.cell_id].seconds == pytest.approx(12e9 / 300e9 + 2e8 / 10e9)
    del peaks.matmul["tf32"]
    bounds = step_bounds({cell.cell_id: prediction(record)}, [summary], peaks=lambda _: {"2 cuda ranks": peaks}, links=None)
    assert bounds.reasons == {cell.cell_id: "the measured peaks of 2 cuda ranks have no products in tf32"}


def test_the_bound_is_that_of_a_step_without_optional_parts() -> None:
    """The predicted step has all parts that any of its samples has, and a measured one may lack them."""
    entry = step_time([record_of()], model_flops=2 * FLOPS, smallest_step_flops=FLOPS // 2)
    assert entry.predicted == pytest.approx(6e9 / 400e9 + 2e8 / 10e9)


UNBOUNDED: dict[str, tuple[str, Any]] = {  # reason, and the changes of cell, record, prediction and peaks
    "padding": ("steps differ in size under padding: longest", {"cell": {"padding": "longest"}}),
    "spike": ("optim.spike skipped measured steps", {"record": {"skipped_steps": [0, 1]}}),
    "freezing": ("the backbone is frozen in measured steps", {"cell": {"optim": OptimSpec(freeze_backbone_steps=2)}}),
    "older": ("do not say what the smallest step takes", {"without": "smallest_step_flops"}),
    "formula": ("declares no formula of its FLOPs", {"prediction": {"smallest_step_flops": None}}),
    "failed": ("no launch ended ok", {"record": {"status": "oom"}}),
    "recipe": ("recipe fp4 is not known here", {"cell": {"recipe": "fp4"}}),
    "device": ("device or threads were not recorded", {"record": {"observed": None}}),
    "dtype": ("the measured peaks of 2 cpu ranks with 1 thread have no products in bfloat16", {"peaks": {"matmul": {}}}),
    "nothing": ("neither FLOPs nor bytes", {"prediction": {"smallest_step_flops": 0, "optimizer_bytes": 0}}),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_cell_without_a_bound_has_its_reason_in_the_section_and_in_the_table(name: str) -> None:
    reason, changes = UNBOUNDED[name]
    cell = replace(CELL, seed=1, **changes.get("cell", {}))
    records = [record_of(), record_of() | {"cell_id": cell.cell_id, "cell": cell.to_dict()} | changes.get("record", {})]
    predictions = {CELL.cell_id: prediction(records[0]), cell.cell_id: prediction(record_of(), **changes.get("prediction", {}))}
    predictions[cell.cell_id].pop(changes.get("without"), None)
    peaks = {GROUP: replace(made_up_peaks(), **changes.get("peaks", {}))}
    report = build_report(example_run([CELL, cell]), records, predictions=predictions, peaks=lambda _: peaks)
    bounded = "peaks" not in changes
    assert len(rows_of_steps(report)) == bounded
    assert report.theory is not None
    (sentence,) = re.findall(r"Without a lower bound of the step time: (.*)\.$", report.theory.note)
    assert sentence.startswith("1 cell (" if bounded else "2 cells (")
    assert reason in sentence
    assert ";" not in sentence
    if bounded:
        (_, (*_, step)) = report.table.rows
        assert (step.text, reason in step.remark) == ("-", True)


def test_a_skipped_warm_up_step_takes_no_bound_away() -> None:
    assert step_time([record_of() | {"skipped_steps": [0]}]).predicted == pytest.approx(0.05)


def test_cells_without_a_bound_are_counted_by_reason_and_none_is_left_out() -> None:
    cells = [replace(CELL, seed=seed, padding="longest" if seed < 2 else "full") for seed in range(4)]
    records = [record_of(cell) for cell in cells]
    predictions = {cell.cell_id: prediction(record) for cell, record in zip(cells[:3], records, strict=False)}
    summaries = summarize(example_run(cells), records)
    bounds = step_bounds(predictions, summaries, peaks=lambda _: {GROUP: made_up_peaks()}, links=None)
    assert [*bounds.by_cell] == [cells[2].cell_id]
    assert bounds.reasons.keys() == {cells[index].cell_id for index in (0, 1, 3)}
    assert "2 cells (steps differ in size" in bounds.note
    assert bounds.note.endswith("; 1 cell (not predicted).")


def test_written_reports_and_estimates_of_a_run_read_the_peaks_and_links_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_peaks("example-cpu-2-cores", made_up_peaks())
    write_links("example-cpu-2-cores", "gloo", made_up_links(bytes_per_s=1e5))
    cell = replace(CELL, policy="pi0")  # `estimate RUN` looks for it
    store, record = RunStore(tmp_path / "run"), record_of(cell)
    store.write_run(example_run([cell]))
    store.write_record(record)
    write_predictions(store.path, {cell.cell_id: prediction(record)}, {})
    assert "| step time | 165.1 ms | 217.0 ms | " in write_reports(store.path).markdown.read_text()

    monkeypatch.setattr("benchbox.cli.predicting.predict_run", lambda *_: {})
    command = ["estimate", str(store.path)]
    text = CliRunner().invoke(app, command, catch_exceptions=False).output
    assert "backend=ddp: step time confirmed\n  predicted 165.1 ms, measured 217.0 ms, error -23.93%; 1.3 times" in text
    entries = json.loads(CliRunner().invoke(app, [*command, "--format", "json"], catch_exceptions=False).output)
    assert [(entry["quantity"], entry["unit"]) for entry in entries] == [
        ("peak memory", "bytes"),
        ("communication", "bytes"),
        ("step time", "s"),
    ]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert "benchbox doctor --peaks --ranks 2" in CliRunner().invoke(app, command, catch_exceptions=False).output


def test_a_batch_that_does_not_fit_has_no_step_to_bound(tmp_path: Path) -> None:
    machine = Machine(tmp_path, lambda _: 4, measure=replace(MEASURE, memory_limit=200 * MIB))
    machine.run()
    run = machine.store.run()
    summaries = summarize(run, machine.store.records())
    predictions = {s.cell_id: prediction(s.records[0]) for s in summaries if not s.beyond_memory}
    bounds = step_bounds(predictions, summaries, peaks=lambda _: {GROUP: made_up_peaks()}, links=None)
    assert len(predictions) < len(summaries)
    assert {*bounds.by_cell, *bounds.reasons} == predictions.keys()
