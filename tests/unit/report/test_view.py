"""The content of a report: only statements that the records support."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.registry.metrics import metrics
from benchbox.registry.phases import PHASES
from benchbox.report.figures.drawing import PRINT
from benchbox.report.html import render_html
from benchbox.report.markdown import render_markdown
from benchbox.report.view import build_report
from benchbox.spec.cell import DataSpec
from tests.support.example_run import CELL, OOM, example_record, example_run, write_example
from tests.support.figure_svg import drawn_bars, texts_of

FSDP, ZERO = replace(CELL, backend="fsdp1_full"), replace(CELL, backend="zero2")


def launches(cell, step_s=0.2, number=2):
    return [example_record(cell, launch, step_s=step_s) for launch in range(1, number + 1)]


def report_of(*cells_and_records, **changes):
    records = [record for part in cells_and_records for record in part]
    cells = {record["cell_id"]: record["cell"] for record in records}
    return build_report(replace(example_run([CELL], **changes), cells=cells), records)


def figure(report, key):
    return next(drawing for drawing in report.figures if drawing.key == key)


def column(report, name):
    index = [column.name for column in report.table.columns].index(name)
    return [row[index].line for row in report.table.rows]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    store = write_example(tmp_path_factory.mktemp("run"))
    return build_report(store.run(), store.records())


def test_a_headline_says_what_was_compared(example):
    """Two launches of each cell cannot settle a pair."""
    assert example.headline.sentences == (
        "Launches do not settle whether fsdp1_full or zero2 trains faster: 4 more of each cell could.",
    )
    assert example.headline.compared == "Pairs differ in backend and in nothing else, requested or observed."
    assert example.headline.refused == ("backend=fsdp1_full cams=4 attention=eager checkpointing=no: fsdp1_full is oom",)
    assert {card.context for card in example.headline.cards} == {
        "cams=1 attention=eager checkpointing=no",
        "cams=1 attention=sdpa checkpointing=yes",
        "cams=4 attention=sdpa checkpointing=yes",
    }


def test_a_card_of_a_run_that_varies_only_the_compared_fields_has_no_context():
    text = render_markdown(report_of(launches(FSDP), launches(ZERO)))
    assert "the samples/s of zero2, by fsdp1\\_full (2 against 2 launches" in text


def test_the_answer_of_a_search_does_not_count_the_launch_that_chose_the_batch():
    walk = {"at_most": 8, "predicted_batch": None, "prediction_reason": None}
    walks = [walk | {"cells": [cell.cell_id], "fastest": cell.cell_id} for cell in (FSDP, ZERO)]
    records = (launches(FSDP, 0.1, number=7), launches(ZERO, 0.3, number=7))
    measure = {"warmup_steps": 1, "steps": 4, "launches": 7}
    for launched, run_walks in ((6, walks), (7, [])):
        settled = report_of(*records, walks=run_walks, measure=measure).answers[0].lines[1].text
        assert settled == f"Settled: {launched} launches of each show every other one to be slower."


def test_a_cell_that_trains_differently_says_so_beside_its_bars():
    wrong = [record | {"grad_norm": [2 * norm for norm in record["grad_norm"]]} for record in launches(FSDP)]
    report = report_of(wrong, launches(ZERO))
    assert column(report, "status") == ["diverged (2/2 ok)", "ok"]
    assert dict(report.counts) == {"cells": 2, "ok": 1, "diverged": 1}
    for key in ("throughput", "memory", "phases"):
        marked = [text for text in texts_of(figure(report, key).svg()) if "(diverged)" in text]
        assert len(marked) == 1, key


def test_cells_that_are_not_compared_for_one_reason_have_one_line():
    report = report_of(launches(FSDP), launches(replace(FSDP, batch=8)), launches(replace(ZERO, attention="eager")))
    assert report.headline.refused == ("attention=sdpa (2 of 3 cells): no cell differs from it in backend only",)
    assert report.headline.refused_cells == 2


def test_a_cell_that_has_not_run_is_among_those_that_are_not_compared():
    run = replace(example_run([CELL]), cells={FSDP.cell_id: FSDP.to_dict(), ZERO.cell_id: ZERO.to_dict()})
    headline = build_report(run, launches(ZERO)).headline
    assert (headline.refused, headline.refused_cells) == (("backend=fsdp1_full: fsdp1_full is missing",), 1)


def test_cells_that_differ_in_more_have_no_headline():
    report = report_of(launches(FSDP), launches(replace(ZERO, attention="eager")))
    assert report.headline.sentences == report.headline.cards == ()
    assert report.headline.refused == ("backend=fsdp1_full attention=sdpa: no cell differs from it in backend only",)
    assert column(report, "vs reference") == ["-", "reference"]


def test_the_headline_quotes_a_settled_pair_with_its_interval():
    report = report_of(launches(FSDP, 0.31, 5), launches(ZERO, 0.2, 5))
    assert report.headline.sentences == ("fsdp1_full trains at 0.65x the samples/s of zero2.",)
    (card,) = report.headline.cards
    assert (card.ratio, card.sentence, card.is_settled) == ("0.65x", "the samples/s of zero2, by fsdp1_full", True)
    assert card.evidence == "5 against 5 launches, 0.60x to 0.69x with 99% confidence: slower"
    assert column(report, "vs reference") == ["0.65x", "reference"]


def test_the_headline_says_that_launches_which_chance_explains_settle_nothing():
    report = report_of(launches(FSDP, 0.201, 5), launches(ZERO, 0.2, 5))
    assert report.headline.sentences == ("Launches do not settle whether fsdp1_full or zero2 trains faster.",)
    assert report.headline.cards[0].evidence.endswith(": not settled")
    assert column(report, "vs reference") == ["1.00x ~", "reference"]
    assert any("chance may explain it" in note for note in report.table.notes)


def test_a_matrix_without_a_reference_has_no_column_of_ratios():
    report = report_of(launches(FSDP), launches(ZERO), reference={})
    assert "vs reference" not in [column.name for column in report.table.columns]
    assert report.headline.cards == report.headline.refused == ()


def test_the_table_shows_the_axes_that_vary_and_constant_fields_appear_once(example):
    assert [column.name for column in example.table.columns][:4] == ["backend", "cams", "attention", "checkpointing"]
    assert dict(example.fixed)["recipe"] == "bf16_master"
    assert "backend" not in dict(example.fixed)
    assert "weights" not in dict(example.fixed), "a field that no cell sets is not listed"
    assert dict(example.settings)["optim.lr"] == "2.5e-05"


def test_a_step_is_shown_with_its_range_over_launches(example):
    assert column(example, "step")[0] == "441 ms (437..445)"


def test_host_memory_is_never_called_device_memory(example):
    assert "peak reserved" not in [column.name for column in example.table.columns]
    assert any(note.endswith("not device memory.") for note in example.table.notes)
    assert any(note.startswith("Peak reserved is unknown: ") for note in example.table.notes)
    memory = figure(example, "memory")
    assert memory.notes == (
        "tensor_storage: bytes of live tensor storage on the host, from a separate untimed step: not device memory.",
    )


def test_device_memory_shows_reserved_bytes_behind_allocated_ones(tmp_path):
    store = write_example(tmp_path, cuda=True)
    report = build_report(store.run(), store.records())
    assert column(report, "peak reserved")[0] == "180 MiB"
    memory = figure(report, "memory")
    assert "fsdp1_full: 160 MiB / 180 MiB (allocated 160 MiB, reserved 180 MiB)." in memory.values
    behind, front = drawn_bars(memory.svg())[:2]
    assert (behind.colour, front.colour, front.hatch) == ("neutral", "s0", "")
    assert behind.hatch
    assert behind.right > front.right
    assert {"reserved", "160 MiB / 180 MiB"} <= set(texts_of(memory.svg()))


def test_flops_are_shown_as_counted_and_by_tower_according_to_the_formula(example):
    observed = {item.name: item.observed for item in example.observed[0].observations}
    assert observed["FLOPs of a step"] == "2.00 GFLOP, 400 MFLOP recomputed"
    assert observed["FLOPs by tower, by formula"] == "vision 600 MFLOP; backbone 1.40 GFLOP, 400 MFLOP recomputed"


def test_flops_that_were_not_counted_have_a_reason_and_older_records_have_no_towers():
    records = launches(FSDP)
    for record in records:
        record["flops"] = {"model_flops_per_step": None, "reason": "its products are not seen"}
    observed = {item.name: item.observed for item in report_of(records).observed[0].observations}
    assert (observed["FLOPs of a step"], observed["FLOPs by tower, by formula"]) == ("its products are not seen", "-")


def test_utilisation_has_columns_where_a_peak_is_known(example, tmp_path):
    assert not {"MFU", "HFU"} & {column.name for column in example.table.columns}
    store = write_example(tmp_path, cuda=True)
    report = build_report(store.run(), store.records())
    assert (column(report, "MFU")[0], column(report, "HFU")[0]) == ("30.0%", "40.0%")


def test_a_fused_phase_is_declared(example):
    phases = figure(example, "phases")
    assert phases.notes == ("zero2: clip has no time of its own: DeepSpeed clips inside its optimizer step.",)
    clip = f"p{PHASES.index('clip')}"
    fsdp, zero = drawn_bars(phases.svg())[:7], drawn_bars(phases.svg())[7:13]
    assert len({bar.y for bar in fsdp}) == len({bar.y for bar in zero}) == 1
    assert [bar.colour for bar in fsdp].count(clip) == 1
    assert [bar.colour for bar in zero].count(clip) == 0


def test_a_fused_phase_is_declared_of_the_backend_that_fuses_it_and_of_no_cell_that_times_it():
    """The bars of this run are named by their cameras, which both backends have."""
    cells = [replace(cell, cams=cams) for cell in (FSDP, ZERO) for cams in (1, 4)]
    phases = figure(report_of(*map(launches, cells), reference={"cams": 1}), "phases")
    assert phases.notes == ("zero2: clip has no time of its own: DeepSpeed clips inside its optimizer step.",)


@pytest.mark.parametrize(("key", "value", "unit"), [("phases", 219, "ms"), ("memory", 160, "MiB")])
def test_a_bar_ends_on_the_axis_at_the_value_in_its_text(key, value, unit):
    bars = figure(report_of(launches(FSDP)), key)
    (panel,) = bars.draw(PRINT).axes
    assert f": {value} {unit}" in bars.values
    assert f"({unit}" in panel.get_xlabel()
    assert max(part.get_x() + part.get_width() for part in panel.patches) == pytest.approx(value)


def test_a_mark_of_a_launch_is_at_its_step_time_in_ms():
    (panel,) = figure(report_of(launches(FSDP, number=3)), "launches").draw(PRINT).axes
    assert panel.get_xlabel() == "step time of a launch (ms)"
    assert list(panel.lines[0].get_xdata()) == pytest.approx([217, 221, 225])


def test_a_cell_that_waits_for_data_names_the_command_that_shows_why():
    slow = replace(FSDP, data=DataSpec(kind="lerobot", path="my/data"))
    records = launches(slow)
    for record in records:
        phases, waits = record["phases_s"], record["phases_s"]["data_wait"]["per_rank"]
        for rank, (wait, forward) in enumerate(zip(waits, phases["forward"]["per_rank"], strict=True)):
            waits[rank] = [w + 0.5 * f for w, f in zip(wait, forward, strict=True)]
            phases["forward"]["per_rank"][rank] = [0.5 * f for f in forward]
    report = report_of(records)
    (note,) = figure(report, "phases").notes
    assert note.endswith(
        "data_wait is 20% of a step; benchbox data bench my/data shows where the time goes and recommends data.workers."
    )


def test_time_outside_the_phases_is_drawn_not_hidden():
    records = launches(ZERO)
    for record in records:
        del record["phases_s"]["optimizer"]
    phases = figure(report_of(records), "phases")
    remainder = drawn_bars(phases.svg())[-1]
    assert remainder.colour == "neutral"
    assert remainder.right - remainder.left > 10
    assert "outside the phases" in texts_of(phases.svg()), "the legend names it"


def test_a_failure_has_rank_phase_and_traceback_and_stays_in_the_charts_without_a_bar(example):
    (failure,) = example.failures
    assert (failure.status, failure.where) == ("oom", "launch 1, rank 1, backward")
    assert failure.message == "OutOfMemoryError: tried to allocate 2.00 GiB"
    assert "torch.OutOfMemoryError" in failure.details
    for key, bars_of_cell in (("throughput", 1), ("memory", 1), ("phases", 6)):
        svg = figure(example, key).svg()
        assert texts_of(svg).count("oom") == 1
        assert len({bar.y for bar in drawn_bars(svg)}) == 7, "the eighth cell has a word and no bar"
        assert len(drawn_bars(svg)) >= 7 * bars_of_cell
    assert dict(example.counts) == {"cells": 8, "ok": 7, "failed": 1, "skipped": 1}


def test_times_of_a_launch_that_failed_after_its_steps_are_no_figure_and_the_failure_says_that_they_are_unchecked():
    records = launches(ZERO)
    for record in records:
        record |= {"status": "oom", "error": OOM, "throughput": None, "unchecked_reason": "the probe did not complete"}
    report = report_of(records)
    assert report.headline.cards == ()
    assert {failure.message for failure in report.failures} == {
        "OutOfMemoryError: tried to allocate 2.00 GiB (the probe did not complete)"
    }
    assert report.figures == ()


def test_a_cell_that_was_skipped_says_why(example):
    assert example.skipped == (("backend=zero3 attention=sdpa checkpointing=yes", "zero3 refuses checkpointing"),)


def test_cells_that_were_skipped_for_different_reasons_have_a_line_each():
    skipped = [{"cell": replace(CELL, backend=name).to_dict(), "reason": f"{name} refuses"} for name in ("zero3", "fsdp2")]
    report = report_of(launches(FSDP), launches(ZERO), skipped=skipped)
    assert report.skipped == report.skipped_groups
    assert report.skipped_groups == (("backend=zero3", "zero3 refuses"), ("backend=fsdp2", "fsdp2 refuses"))


def test_an_incomplete_cell_is_not_shown_as_ok():
    report = report_of(launches(ZERO)[:1])
    assert column(report, "status") == ["incomplete (1/2 ok)"]
    assert dict(report.counts) == {"cell": 1, "ok": 0, "incomplete": 1}
    texts = texts_of(figure(report, "throughput").svg())
    assert any(text.endswith("samples/s (1/2 ok)") for text in texts)


def test_requested_values_are_shown_beside_observed_ones(example):
    observed = {item.name: (item.requested, item.observed) for item in example.observed[1].observations}
    assert observed["attention"] == ("sdpa", "sdpa:flash_cpu")
    assert observed["checkpointing"] == ("yes", "4 modules recomputed")
    assert observed["shard elements, by rank"] == (None, "1,000, 1,001")
    assert observed["parameters that train"] == ("full", "2,001 of 2,001 elements")
    assert observed["collectives in a step"] == (None, "3 all_reduce of 7.82 KiB in all, 2 all_gather of 7.82 KiB in all")


def test_the_freeze_preset_is_an_axis_like_any_other():
    """The preset has a column where it varies, a ratio along it, and the counted elements beside the request."""
    frozen = replace(CELL, freeze="freeze_vision")
    report = report_of(launches(CELL, number=5), launches(frozen, 0.1, 5), reference={"freeze": "full"})
    assert column(report, "freeze") == ["full", "freeze_vision"]
    assert report.headline.sentences == ("freeze=freeze_vision trains at 2.00x the samples/s of freeze=full.",)
    observed = {item.name: (item.requested, item.observed) for item in report.observed[1].observations}
    assert observed["parameters that train"] == ("freeze_vision", "1,234 of 2,001 elements")


def test_a_record_from_before_cells_could_freeze_has_no_count_of_trainable_parameters():
    records = launches(CELL)
    for record in records:
        for cell in (record["cell"], record["config"]):
            del cell["freeze"]
        del record["observed"]["trainable_numel"]
    observed = {item.name: (item.requested, item.observed) for item in report_of(records).observed[0].observations}
    assert observed["parameters that train"] == (None, "-")


def test_findings_are_listed_once_with_their_cells():
    records = [*launches(FSDP), *launches(ZERO)]
    for record in records:
        record["precision"]["findings"] = [
            {
                "code": "BXP101",
                "severity": "error",
                "title": "16-bit stepped",
                "where": "w",
                "rank": 0,
                "evidence": {},
                "repair": "r",
            }
        ]
    report = report_of(records)
    (finding,) = report.findings
    assert finding.cells == ("backend=fsdp1_full", "backend=zero2")
    assert column(report, "findings") == ["BXP101 error", "BXP101 error"]


def test_the_method_section_is_the_metrics_declarations(example):
    assert [(entry.name, entry.formula) for entry in example.method] == [(m.name, m.formula) for m in metrics().values()]
    assert "launched 1 to 2 times, of 2 planned" in example.sampling  # a cell that ran out of memory once
    assert "1 warm-up step," in example.sampling
    assert "does not reject at 1%." in example.sampling
    assert "reject equality and the ratio is at least 2% from 1," in example.sampling
    launches_of = {entry.name: entry.launches for entry in example.method}
    assert launches_of["step_time_s"] == "the median launch"
    assert launches_of["peak_allocated_bytes"] == launches_of["status"] == "the worst launch"


def test_an_environment_that_changed_between_launches_shows_both():
    first_launch, second_launch = launches(ZERO)
    second_launch["environment"]["torch"] = "2.14.0"
    assert dict(report_of([first_launch, second_launch]).environment)["torch"] == "2.13.0 | 2.14.0"


def test_a_run_of_failures_and_a_run_that_has_not_begun_still_have_a_report():
    failed = report_of([example_record(status="crash", error=OOM)])
    assert failed.figures == failed.observed == failed.environment == ()
    assert column(failed, "status") == ["crash (0/2 ok)"]
    begun = build_report(example_run([CELL]), [])
    assert column(begun, "status") == ["missing"]
    assert begun.failures[0].message == "it has not run"
    assert dict(begun.counts) == {"cell": 1, "ok": 0, "missing": 1}


def test_steps_that_were_skipped_because_of_their_gradient_are_marked_and_explained():
    records = [*launches(FSDP), *launches(ZERO)]
    records[1]["skipped_steps"] = [1, 3]
    table = report_of(records).table
    assert any(note.startswith("partial steps: in measured steps, optim.spike skipped the update") for note in table.notes)
    position = [entry.name for entry in table.columns].index("status")
    remarks = {row[position].remark for row in table.rows}
    assert "2 of 2 launches ok; launch 2: optim.spike skipped measured steps, which lack the update of the weights" in remarks
    assert not any("optim.spike" in note for note in report_of(launches(FSDP)).table.notes)


def test_a_cell_that_waits_for_generated_samples_is_not_sent_to_a_dataset():
    waiting = [replace(cell, data=DataSpec(kind="synthetic")) for cell in (FSDP, replace(ZERO, backend="ddp"))]
    records = [record for cell in waiting for record in launches(cell)]
    for number, record in enumerate(records):
        phases = record["phases_s"]
        for waits, forward in zip(phases["data_wait"]["per_rank"], phases["forward"]["per_rank"], strict=True):
            waits[:] = [wait + (0.2 if number < 2 else 0.5) * step for wait, step in zip(waits, forward, strict=True)]
            forward[:] = [(0.8 if number < 2 else 0.5) * step for step in forward]
    assert figure(report_of(*[records]), "phases").notes == (
        "fsdp1_full, ddp: data_wait is 11% to 20% of a step; the samples are generated, so a dataset may take less.",
    )


def test_only_the_cell_that_waits_is_named_among_cells_whose_bars_have_one_name():
    cells = [replace(cell, data=DataSpec(kind="synthetic"), cams=cams) for cell in (FSDP, ZERO) for cams in (1, 4)]
    parts = [launches(cell) for cell in cells]
    for record in parts[1]:
        phases = record["phases_s"]
        for waits, forward in zip(phases["data_wait"]["per_rank"], phases["forward"]["per_rank"], strict=True):
            waits[:] = [wait + 0.5 * step for wait, step in zip(waits, forward, strict=True)]
            forward[:] = [0.5 * step for step in forward]
    note = figure(report_of(*parts, reference={"cams": 1}), "phases").notes[-1]
    assert note.startswith("fsdp1_full cams=4: data_wait is ")


def test_a_cell_that_is_not_compared_is_named_by_the_axis_where_its_value_alone_says_nothing():
    failed, other = replace(ZERO, checkpointing=True), ZERO
    error = {"type": "RuntimeError", "message": "", "rank": 0, "phase": None, "traceback": None}
    crash = [example_record(failed, status="crash", error=error)]
    assert report_of(launches(other), crash, reference={"checkpointing": False}).headline.refused == (
        "checkpointing=yes: checkpointing=yes is crash",
    )


def test_one_cell_is_counted_as_one():
    report = report_of(launches(CELL))
    assert report.counts == (("cell", 1), ("ok", 1))
    assert "No rule fired in the 1 cell of which a census was taken." in render_html(report)
