"""The answer of a run: which set-up, is that settled, is its precision right."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from benchbox.analysis.answers import answers
from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.inference import Criteria
from benchbox.analysis.summary import summarize, varying_fields
from benchbox.report.answer import answer_boxes
from benchbox.report.view import build_report
from tests.support.example_run import CELL, MEASURE, MIB, OOM, example_record, example_run, steady_records
from tests.support.host_states import busy_state

ZERO2, FSDP2, ZERO1, ZERO3 = (replace(CELL, backend=backend) for backend in ("zero2", "fsdp2", "zero1", "zero3"))
ERROR = {
    "code": "BXP101", "severity": "error", "title": "t", "where": "w", "rank": 0, "evidence": {}, "repair": "r", "cause": None,
    "locations": [],
}  # fmt: skip


def summaries_of(speeds, *, launches=7, change=None):
    """Return summaries of cells with these step times. `change` edits the records of a cell."""
    cells = list(speeds)
    records = [
        record if change is None else change(cell, record)
        for cell, step_s in speeds.items()
        for record in steady_records(cell, step_s=step_s, launches=launches)
    ]
    run = example_run(cells, measure=asdict(MEASURE) | {"launches": launches})
    return summarize(run, records)


def box(summaries, **options):
    (answer,) = answer_boxes(summaries, varying_fields(summary.cell for summary in summaries), **options)
    return [(line.level, line.text) for line in answer.lines]


def test_the_fastest_is_settled_when_launches_show_every_other_one_to_be_slower():
    fastest, settled, precision = box(summaries_of({CELL: 0.25, ZERO2: 0.2, FSDP2: 0.3}))
    assert fastest[1].startswith("Fastest of 3 set-ups: backend=zero2, 20.0 samples/s, ")
    assert settled == ("ok", "Settled: 7 launches of each show every other one to be slower.")
    assert precision == ("ok", "Precision is right: the audit has no error, EDQ 1.000.")


@pytest.mark.parametrize(
    ("values", "doubt"),
    [
        (
            {"host": busy_state()},
            "It was measured on a busy host.",
        ),
        ({"compilation": {"per_rank": [{"time_s": 2.0, "in_measured_steps": 1}]}}, "It compiled in measured steps."),
        (
            {
                "compilation": {
                    "per_rank": [
                        {
                            "time_s": 2.0,
                            "in_measured_steps": 0,
                            "limits_reached": [{"function": "forward", "reason": "a shape"}],
                        }
                    ]
                }
            },
            "A part of it ran uncompiled.",
        ),
    ],
)
def test_what_is_settled_by_launches_that_are_in_doubt_says_so(values, doubt):
    def change(cell, record):
        return record | values if cell is ZERO2 else record

    summaries = summaries_of({CELL: 0.25, ZERO2: 0.2, FSDP2: 0.3}, change=change)
    text = f"Settled: 7 launches of each show every other one to be slower. {doubt}"
    assert box(summaries)[1] == ("warning", text)


def test_what_the_table_does_not_settle_for_its_number_of_pairs_the_answer_does_not_either():
    """Five launches settle a pair of one task, and not one of each of two tasks."""
    speeds = {replace(cell, cams=cams): step_s for cams in (1, 4) for cell, step_s in ((CELL, 0.2), (ZERO2, 0.1))}
    summaries = summaries_of(speeds, launches=5)
    boxes = answer_boxes(summaries, varying_fields(summary.cell for summary in summaries))
    assert [answer.lines[1].text for answer in boxes] == ["Not settled against backend=ddp: 1 more launch of each could."] * 2


def test_a_part_of_the_launches_that_are_judged_together_settles_nothing():
    records = [record for cell, step_s in ((CELL, 0.2), (ZERO2, 0.1)) for record in steady_records(cell, step_s=step_s)]
    summaries = summarize(example_run([CELL, ZERO2], measure=asdict(MEASURE) | {"launches": 7}), records)
    assert box(summaries)[1][1] == "Settled: 5 launches of each show every other one to be slower."
    text = "Not comparable with backend=ddp: 7 launches of both cells are judged together, and some are missing."
    assert box(summaries, criteria=Criteria(complete=True))[1] == ("warning", text)


def test_the_fastest_is_chosen_by_the_launches_that_all_have():
    """The machine became slower after the seventh launch of all, and two cells were launched on."""
    speeds = {CELL: 0.2, ZERO1: 0.2, ZERO2: 0.19}
    records = [record for cell, step_s in speeds.items() for record in steady_records(cell, step_s=step_s, launches=7)]
    for cell in (CELL, ZERO2):
        later = steady_records(cell, step_s=speeds[cell] * 1.3, launches=30)[7:]
        records += later
    summaries = summarize(example_run([*speeds], measure=asdict(MEASURE) | {"launches": 7}), records)
    fastest, settled, _ = box(summaries)
    assert fastest[1].startswith("Fastest of 3 set-ups: backend=zero2, ")
    assert settled == ("ok", "Settled: at least 7 launches of each show every other one to be slower.")


def test_of_set_ups_that_nothing_settles_the_one_that_leads_in_the_launches_of_all_is_named():
    records = [record for cell, s in ((CELL, 0.2), (ZERO2, 0.19)) for record in steady_records(cell, step_s=s, launches=2)]
    records += steady_records(ZERO2, step_s=0.25, launches=4)[2:]
    summaries = summarize(example_run([CELL, ZERO2]), records)
    assert box(summaries)[0][1].startswith("Fastest of 2 set-ups: backend=zero2, ")


def test_the_fastest_is_not_one_that_more_launches_show_to_be_slower():
    """It leads in the only launch that all three have."""
    speeds = {CELL: 0.2, ZERO1: 0.3, ZERO2: 0.19}
    records = [record for cell, step_s in speeds.items() for record in steady_records(cell, step_s=step_s, launches=9)]
    records = [record for record in records if record["cell_id"] != ZERO1.cell_id or record["launch"] == 1]
    first = next(record for record in records if record["cell_id"] == CELL.cell_id)
    first["throughput"] = {"global_samples_per_s": 21.5, "per_rank_samples_per_s": []}
    summaries = summarize(example_run([*speeds], measure=asdict(MEASURE) | {"launches": 1}), records)
    assert box(summaries)[0][1].startswith("Fastest of 3 set-ups: backend=zero2, ")


def test_a_near_rival_is_named_with_the_interval():
    """Faster by less than what is relevant, in launches that scatter by more."""

    def change(cell, record):
        factor = 1 + 0.03 * (record["launch"] % 3) if cell is FSDP2 else 1
        return record | {"throughput": {"global_samples_per_s": 19.8 * factor, "per_rank_samples_per_s": []}}

    _, settled, _ = box(summaries_of({CELL: 0.25, FSDP2: 0.2}, change=change))
    assert settled == ("warning", "Not settled against backend=ddp: 1.03x its samples/s, 1.00x to 1.06x.")


def test_a_rival_that_differs_by_nothing_relevant_is_as_fast():
    _, settled, _ = box(summaries_of({CELL: 0.25, ZERO2: 0.2, FSDP2: 0.201}))
    text = "Settled: 7 launches of each show nothing to be faster, and backend=fsdp2 to differ by less than 2%."
    assert settled == ("ok", text)


def test_a_rival_that_is_as_fast_is_not_among_those_that_are_not_settled():
    """It is the nearest one. The launches of the other one scatter by a tenth around 19.4 samples/s."""

    def change(cell, record):
        rates = {"global_samples_per_s": 19.4 * (1 + 0.1 * (record["launch"] % 3 - 1)), "per_rank_samples_per_s": []}
        return record | {"throughput": rates} if cell is CELL else record

    _, settled, _ = box(summaries_of({CELL: 0.2, ZERO2: 0.2, FSDP2: 0.201}, change=change))
    assert settled == ("warning", "Not settled against backend=ddp: 1.03x its samples/s, 0.92x to 1.16x.")


def test_too_few_launches_settle_nothing_and_the_line_says_how_many_are_missing():
    """Three pairs of cells share the 1%, because the fastest is chosen by the launches that are tested."""
    _, settled, _ = box(summaries_of({CELL: 0.5, ZERO2: 0.2, FSDP2: 0.3}, launches=2))
    assert settled[1] == "Not settled against backend=fsdp2 and 1 more: 4 more launches of each could."


def test_missing_launches_are_those_of_the_fastest_and_its_nearest_rival():
    """Another cell was launched once, as a batch of a walk that is not its fastest."""
    cells = {CELL: 0.2, ZERO2: 0.205, FSDP2: 0.9}
    records = [
        record
        for cell, step_s in cells.items()
        for record in steady_records(cell, step_s=step_s, launches=1 if cell is FSDP2 else 5)
    ]
    _, settled, _ = box(summarize(example_run(list(cells), measure=asdict(MEASURE) | {"launches": 5}), records))
    assert settled[1] == "Not settled against backend=zero2 and 1 more: 1 more launch of each could."


def test_five_launches_settle_a_pair_but_not_the_choice_among_three():
    assert answers(summaries_of({CELL: 0.5, ZERO2: 0.2}, launches=5))[0].is_settled
    assert not answers(summaries_of({CELL: 0.5, ZERO2: 0.2, FSDP2: 0.3}, launches=5))[0].is_settled


FIVE = {CELL: 0.25, ZERO2: 0.2, FSDP2: 0.3, ZERO1: 0.35, ZERO3: 0.4}


@pytest.mark.parametrize(("reference", "unsettled"), [("zero2", set()), ("zero3", {"ddp", "fsdp2", "zero1"})])
def test_a_pair_that_is_settled_with_the_reference_is_settled_in_the_answer_too(reference, unsettled):
    """Six launches settle the four pairs with the reference, and none of the ten pairs of five set-ups."""
    summaries = summaries_of(FIVE, launches=6)
    run = example_run(list(FIVE), measure=asdict(MEASURE) | {"launches": 6}, reference={"backend": reference})
    compared = [*compare_run(run, summaries, ()).cells.values()]
    assert len(compared) == 4
    assert all(comparison.is_settled for comparison in compared)
    assert len(answers(summaries)[0].rivals) == 4
    (answer,) = answers(summaries, compared=compared)
    assert answer.fastest.cell["backend"] == "zero2"
    assert {rival.summary.cell["backend"] for rival in answer.rivals} == unsettled
    records = [record for cell, step_s in FIVE.items() for record in steady_records(cell, step_s=step_s, launches=6)]
    texts = [line.text for line in build_report(run, records).answers[0].lines]
    expected = "Not settled against backend=ddp and 2 more: 1 more launch of each could."
    assert texts[1] == (expected if unsettled else "Settled: 6 launches of each show every other one to be slower.")


def test_a_set_up_that_the_reference_shows_to_be_faster_is_the_answer():
    """It is not the fastest by the launches that all set-ups have."""
    summaries = summaries_of({CELL: 0.2, ZERO2: 0.201}, launches=5)
    first, second = (summary.cell_id for summary in summaries)
    pair = SimpleNamespace(pair_id=f"{second}/{first}", verdict="improvement", is_settled=True)
    assert answers(summaries)[0].fastest.cell_id == first
    assert answers(summaries, compared=[pair])[0].fastest.cell_id == second


def with_error(cell, record):
    if cell is ZERO2:
        record["precision"]["findings"] = [ERROR]
    return record


def test_a_faster_set_up_whose_precision_is_wrong_is_no_answer_and_is_named():
    fastest, _, precision = box(summaries_of({CELL: 0.25, ZERO2: 0.2, FSDP2: 0.3}, change=with_error))
    assert "backend=ddp" in fastest[1]
    assert precision[1].endswith("Not counted, because their precision is wrong: backend=zero2.")
    assert box(
        summaries_of({ZERO2: 0.2, replace(ZERO2, batch=3): 0.2}, change=lambda _, record: with_error(ZERO2, record))
    ) == [("bad", "No answer: the precision of every set-up that fits is wrong.")]


def test_of_many_faster_set_ups_whose_precision_is_wrong_three_are_named_and_the_others_counted():
    def change(cell, record):
        return record if cell is CELL else with_error(ZERO2, record)

    *_, precision = box(summaries_of({CELL: 0.25, ZERO2: 0.2, FSDP2: 0.21, ZERO1: 0.22, ZERO3: 0.23}, change=change))
    assert precision[1].endswith(" wrong: backend=zero2, backend=fsdp2, backend=zero1 and 1 more.")


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        (None, "it was not audited"),
        ({"findings": [ERROR | {"severity": "unknown"}]}, "the audit could not judge it"),
    ],
)
def test_precision_that_was_not_judged_is_unknown_with_the_reason(precision, reason):
    def change(_, record):
        merged = None if precision is None else record["precision"] | precision
        return record | {"precision": merged}

    _, _, line = box(summaries_of({CELL: 0.25, ZERO2: 0.2}, change=change))
    assert line == ("warning", f"Precision is unknown: {reason}.")


def test_a_memory_limit_excludes_what_does_not_fit():
    def change(cell, record):
        record["memory"]["worst"]["allocated_peak_bytes"] = (300 if cell is ZERO2 else 100) * MIB
        return record

    summaries = summaries_of({CELL: 0.25, ZERO2: 0.2, FSDP2: 0.3}, change=change)
    fastest, *_ = box(summaries, memory_limit=200 * MIB)
    assert fastest[1].startswith("Fastest of 2 set-ups in 200 MiB: backend=ddp, ")
    assert fastest[1].endswith("; 1 needs more.")
    assert "backend=zero2" in box(summaries, memory_limit=300 * MIB)[0][1], "it fits if it takes all of it"
    assert box(summaries, memory_limit=MIB) == [("bad", "No answer: none of 3 set-ups fits in 1.00 MiB.")]


def test_a_set_up_of_unknown_memory_is_no_answer_within_a_limit():
    """A compiled one on a CPU, for example."""

    def change(cell, record):
        record["memory"]["worst"]["allocated_peak_bytes"] = None if cell in unknown else 100 * MIB
        return record

    unknown = [ZERO2]
    summaries = summaries_of({CELL: 0.25, ZERO2: 0.2, FSDP2: 0.3}, change=change)
    fastest, *_ = box(summaries, memory_limit=200 * MIB)
    assert fastest[1].startswith("Fastest of 2 set-ups in 200 MiB: backend=ddp, ")
    assert fastest[1].endswith("; what 1 needs is unknown.")
    expected = "No answer: none of 2 set-ups fits in 1.00 MiB; the memory of 1 set-up is unknown."
    assert box(summaries, memory_limit=MIB) == [("bad", expected)]
    assert box(summaries)[0][1].startswith("Fastest of 3 set-ups: backend=zero2, ")
    unknown = [CELL, ZERO2]
    compiled = summaries_of({CELL: 0.25, ZERO2: 0.2}, change=change)
    assert box(compiled, memory_limit=MIB) == [("bad", "No answer: the memory of 2 set-ups is unknown.")]


def test_the_only_candidate_is_not_called_the_only_set_up_beside_others_that_ended_ok():
    """One of them is too large, one is slower and wrong, and a third one crashed."""

    def change(cell, record):
        if cell is ZERO2:
            return with_error(ZERO2, record)
        if cell is FSDP2:
            record["memory"]["worst"]["allocated_peak_bytes"] = 300 * MIB
        if cell is ZERO1:
            return record | {"status": "crash", "error": OOM, "throughput": None}
        return record

    slower, larger, crashed = "; the precision of 1 slower one is wrong.", "; 1 needs more", "; 1 crashed"
    for others, beginning, end in (
        ([ZERO2], "The only set-up that has no error of precision: backend=ddp, ", slower),
        ([ZERO2, ZERO1], "The only set-up that ended ok and has no error of precision: ", crashed + slower),
        ([FSDP2, ZERO1], "The only set-up that ended ok and fits in 200 MiB: ", f"{larger}{crashed}."),
        ([ZERO1], "The only set-up of 2 that ended ok in 200 MiB: ", f"{crashed}."),
    ):
        fastest, *_ = box(summaries_of({CELL: 0.2} | dict.fromkeys(others, 0.3), change=change), memory_limit=200 * MIB)
        assert fastest[1].startswith(beginning)
        assert fastest[1].endswith(end)
    fastest, *_ = box(summaries_of({CELL: 0.2, FSDP2: 0.25, ZERO2: 0.3}, change=change))
    assert fastest[1].startswith("Fastest of 2 set-ups: ")
    assert fastest[1].endswith(slower)


def test_every_task_has_an_answer_of_its_own_and_failed_cells_are_none():
    four = [replace(cell, cams=4) for cell in (CELL, ZERO2)]
    cells = [CELL, ZERO2, *four]
    records = [
        record for cell in cells[:3] for record in steady_records(cell, step_s=0.2 + 0.1 * (cell.backend == "ddp"), launches=7)
    ]
    records.append(example_record(four[1], status="oom", error=OOM))
    run = example_run(cells, measure=asdict(MEASURE) | {"launches": 7})
    boxes = answer_boxes(summarize(run, records), ["backend", "cams"])
    assert [box.task for box in boxes] == ["cams=1", "cams=4"]
    assert [line.text for line in boxes[1].lines][:2] == [
        boxes[1].lines[0].text,
        "Nothing to compare it with.",
    ]
    assert boxes[1].lines[0].text.startswith("The only set-up of 2 that ended ok: backend=ddp, ")
    assert boxes[1].lines[0].text.endswith("; 1 ran out of memory.")


@pytest.mark.parametrize(
    ("status", "outcome", "level", "settled"),
    [
        (
            "crash",
            "1 crashed",
            "warning",
            "Not settled against 1 crashed; 7 launches of each show every other one to be slower.",
        ),
        (
            None,
            "1 not measured",
            "warning",
            "Not settled against 1 not measured; 7 launches of each show every other one to be ",
        ),
        ("nan", "1 nan", "warning", "Not settled against 1 nan; 7 launches of each show every other one to be slower."),
        ("oom", "1 ran out of memory", "ok", "Settled: 7 launches of each show every other one to be slower."),
    ],
)
def test_set_ups_that_failed_are_counted_and_nothing_is_settled_while_one_of_unknown_speed_is_left(
    status, outcome, level, settled
):
    records = [
        record
        for cell, step_s in {CELL: 0.25, ZERO2: 0.2, FSDP2: 0.3}.items()
        for record in steady_records(cell, step_s=step_s, launches=7)
    ]
    if status is not None:
        records.append(example_record(ZERO3, status=status, error=OOM))
    run = example_run([CELL, ZERO2, FSDP2, ZERO3], measure=asdict(MEASURE) | {"launches": 7})
    summaries = summarize(run, records)
    lines = box(summaries)
    assert lines[0][1].startswith("Fastest of 3 of 4 set-ups: backend=zero2, ")
    assert lines[0][1].endswith(f"; {outcome}.")
    assert lines[1][0] == level
    assert lines[1][1].startswith(settled)
    assert answers(summaries)[0].is_settled == (level == "ok")


def test_cells_of_other_versions_are_not_compared():
    def change(cell, record):
        return record | {"environment": record["environment"] | {"torch": "2.12.0" if cell is CELL else "2.13.0"}}

    _, settled, _ = box(summaries_of({CELL: 0.25, ZERO2: 0.2}, change=change))
    assert settled[1].startswith("Not comparable with backend=ddp: they also differ in torch")


def test_a_run_that_varies_no_set_up_has_no_answer():
    cells = [CELL, replace(CELL, cams=4)]
    assert answer_boxes(summaries_of(dict.fromkeys(cells, 0.2)), ["cams"]) == ()
