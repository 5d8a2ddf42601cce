"""Comparisons of walks, each at its fastest batch, without the launches that chose it."""

from __future__ import annotations

import io
from dataclasses import replace
from statistics import median

import pytest
from rich.console import Console

from benchbox.analysis.best_batches import compare_run, repeats
from benchbox.analysis.certificates import certificates
from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import summarize
from benchbox.report.headline import evidence_of
from benchbox.report.markdown import render_markdown
from benchbox.report.terminal import print_table
from benchbox.report.view import build_report
from tests.support.example_run import MEASURE, MIB, OOM, example_record, steady_records
from tests.support.walks import START, Killed, Machine

LIMITED = replace(MEASURE, memory_limit=200 * MIB)
BACKENDS = (replace(START, backend="fsdp1_full"), replace(START, backend="zero2"))


def records_of(machine: Machine, *, at_start=None, speed=1.0):
    """Return the records of a run, with keys of that of FSDP at batch 2 changed and its throughputs multiplied."""
    records = []
    for record in machine.store.records():
        if record["cell"]["backend"] == "fsdp1_full":
            record |= (at_start or {}) if record["cell"]["batch"] == 2 else {}
            if throughput := record["throughput"]:
                record["throughput"] = throughput | {"global_samples_per_s": speed * throughput["global_samples_per_s"]}
        records.append(record)
    return records


def compared(machine: Machine, **changes):
    """Return the comparisons of a run. The changes are those of `records_of`."""
    run = machine.store.run()
    summaries = summarize(run, records_of(machine, **changes))
    return compare_run(run, summaries, certificates(run, summaries))


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path, lambda _: 6, measure=LIMITED, predicted=5, fastest=5)


def test_set_ups_are_compared_at_the_fastest_batch_of_each_and_the_batch_is_named(tmp_path):
    largest = {"fsdp1_full": 6, "zero2": 9}
    machine = Machine(
        tmp_path, lambda cell: largest[cell.backend], BACKENDS, replace(LIMITED, launches=8), predicted=5, fastest=7
    )
    machine.run()
    run = machine.store.run()
    (comparison,) = compared(machine).walks
    assert comparison.axis == ("backend", "batch")
    assert (comparison.subject.cell["batch"], comparison.reference.cell["batch"]) == (6, 7)
    assert comparison.effect.launches == (7, 7), "the launch that chose the batch does not count"
    report = render_markdown(build_report(run, list(machine.store.records())))
    assert "| backend=fsdp1\\_full | 6 | 7 |" in report
    assert "The batch is chosen here and not compared" in report
    stream = io.StringIO()
    print_table(machine.folder, Console(file=stream))
    lines = stream.getvalue().splitlines()
    (row,) = (line for line in lines if line.startswith("backend=fsdp1_full  6 "))
    assert " ".join(row.split()).endswith(" - 2: 12.3, 5: 15.4, 6: 15.7*, 7: oom 4 + 7")
    assert lines[lines.index("* the highest throughput of the walk") + 1].startswith("2 of 2 walks have a certificate")
    assert any(
        line.startswith("backend=fsdp1_full at batch 6, over the reference at batch 7: 0.91x (7 against 7") for line in lines
    )


def test_the_answer_has_the_verdict_of_walks_at_different_batches(tmp_path):
    """Six launches settle two pairs of walks, and not the six pairs of four set-ups. The pair of both other axes stays open."""
    largest = {"fsdp1_full": 6, "zero2": 9}
    starts = [replace(start, attention=kernel) for start in BACKENDS for kernel in ("sdpa", "eager")]
    measure = replace(LIMITED, launches=7)
    machine = Machine(tmp_path, lambda cell: largest[cell.backend], starts, measure, predicted=5, fastest=9)
    machine.run()
    report = build_report(machine.store.run(), records_of(machine, speed=0.4))
    assert {row[3].partition(" ")[0] for row in report.walks.best} == {"0.31x"}
    (answer,) = report.answers
    assert "batch=9" in answer.lines[0].text
    assert answer.lines[1].text.startswith("Not settled against backend=zero2")
    assert " and 1 more: " in answer.lines[1].text


def test_set_ups_that_cannot_be_compared_at_their_fastest_batches_say_why(tmp_path):
    machine = Machine(tmp_path, lambda _: 3, BACKENDS, LIMITED, predicted=3, fastest=3)
    machine.run()
    records = list(machine.store.records())
    for record in records:
        record["environment"] = record["environment"] | {"torch": record["cell"]["backend"]}
    (row,) = build_report(machine.store.run(), records).walks.best
    assert row == ("backend=fsdp1_full", "3", "3", "-", "they also differ in torch: fsdp1_full against zero2")


def test_the_launch_that_chose_a_batch_is_shown_where_there_is_no_other_and_settles_nothing(tmp_path):
    machine = Machine(tmp_path, lambda _: 3, BACKENDS, replace(LIMITED, launches=1), predicted=3, fastest=3)
    machine.run()
    (comparison,) = compared(machine).walks
    assert comparison.effect.launches == (1, 1)
    assert (comparison.verdict, comparison.is_search, comparison.more_launches) == ("inconclusive", True, 5)
    assert evidence_of(comparison) == (
        "1 against 1 launches, which searched for the batch and settle nothing; 5 more of each cell could"
    )


def test_one_pair_of_cells_has_one_verdict_as_walks_and_at_the_same_batch(tmp_path):
    """Batch 3 is the fastest of both walks. At batch 2 there are only the launches that searched."""
    machine = Machine(tmp_path, lambda _: 3, BACKENDS, replace(LIMITED, launches=8), predicted=3, fastest=3)
    machine.run()
    comparisons = compared(machine, speed=0.5)
    (walks,) = comparisons.walks
    first, fastest, beyond = sorted(comparisons.cells.values(), key=lambda comparison: comparison.subject.cell["batch"])
    assert (walks.verdict, walks.effect.launches) == ("regression", (7, 7))
    assert (fastest.effect, fastest.verdict, fastest.axis) == (walks.effect, walks.verdict, ("backend",))
    assert (walks.of_walks, fastest.of_walks) == (True, False)
    assert (first.effect.launches, first.verdict, first.is_search, first.more_launches) == ((1, 1), "inconclusive", True, None)
    assert beyond.effect is None
    headline = build_report(machine.store.run(), records_of(machine, speed=0.5)).headline
    (card,) = headline.cards
    assert (card.ratio, card.sentence) == ("0.50x", "the samples/s of zero2 batch=3, by fsdp1_full batch=3")
    assert card.evidence == "7 against 7 launches, 0.47x to 0.53x with 99% confidence: slower"
    assert headline.sentences == ("fsdp1_full trains at 0.50x the samples/s of zero2, each at its fastest batch.",)
    assert headline.compared.startswith(
        "Pairs differ in backend, of walks also in the batch, which is the fastest of each, and"
    )


def compared_with_fixed(machine: Machine, batch: int):
    """Return the comparison of a batch of FSDP's walk with a cell of ZeRO-2 that is in no walk, launched in turns."""
    walk = replace(machine, starts=BACKENDS[:1])
    walk.run()
    run, records = walk.store.run(), []
    cell = replace(BACKENDS[1], batch=batch)
    for record in walk.store.records():
        if record["cell"]["batch"] == batch:
            # The launch that searched was ten times as fast, by chance.
            speed = record["throughput"]["global_samples_per_s"] * (10 if record["launch"] == 1 else 0.5)
            record["throughput"] = record["throughput"] | {"global_samples_per_s": speed}
            times = {"started_at": record["started_at"].replace(":00+", ":30+")}
            records.append(example_record(cell, record["launch"]) | {"environment": record["environment"]} | times)
        records.append(record)
    run = replace(run, cells={**run.cells, cell.cell_id: cell.to_dict()})
    summaries = summarize(run, records)
    return compare_run(run, summaries, certificates(run, summaries)).cells[replace(BACKENDS[0], batch=batch).cell_id]


@pytest.mark.parametrize(("launches", "more"), [(8, None), (1, 5)])
def test_the_launch_that_searched_is_not_judged_beside_a_cell_without_a_walk(machine, launches, more):
    comparison = compared_with_fixed(replace(machine, measure=replace(LIMITED, launches=launches)), batch=5)
    assert comparison.effect.launches[0] == max(1, launches - 1)
    assert (comparison.is_search, comparison.more_launches) == (launches == 1, more)


def test_a_batch_that_is_not_repeated_waits_for_no_launches_beside_a_cell_without_a_walk(machine):
    comparison = compared_with_fixed(replace(machine, measure=replace(LIMITED, launches=8)), batch=2)
    assert (comparison.effect.launches, comparison.verdict) == ((1, 1), "inconclusive")
    assert (comparison.is_search, comparison.more_launches) == (True, None)


def test_launches_that_search_settle_nothing_where_walks_have_not_ended(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, BACKENDS, LIMITED, predicted=4, fastest=7)
    with pytest.raises(Killed):
        machine.run(at_most_launches=4)
    headline = build_report(machine.store.run(), records_of(machine)).headline
    assert headline.sentences == ("Launches that search for a batch do not settle whether fsdp1_full or zero2 trains faster.",)
    assert {card.evidence for card in headline.cards} == {
        "1 against 1 launches, which searched for the batch and settle nothing"
    }


def test_cells_without_a_walk_and_walks_share_the_probability_of_a_wrong_verdict(tmp_path):
    machine = Machine(tmp_path, lambda _: 3, BACKENDS, replace(LIMITED, launches=6), predicted=3, fastest=3)
    machine.run()
    alone = compared(machine, speed=0.5).walks[0]
    assert (alone.verdict, alone.effect.launches, alone.more_launches) == ("regression", (5, 5), None)
    beside = [replace(START, backend=backend, cams=2) for backend in ("fsdp1_full", "zero2")]
    run, records = machine.store.run(), records_of(machine, speed=0.5)
    records += [
        record for cell, step_s in zip(beside, (0.4, 0.2), strict=True) for record in steady_records(cell, step_s=step_s)
    ]
    run = replace(run, cells={**run.cells, **{cell.cell_id: cell.to_dict() for cell in beside}})
    summaries = summarize(run, records)
    comparisons = compare_run(run, summaries, certificates(run, summaries))
    both = (comparisons.walks[0], comparisons.cells[beside[0].cell_id])
    assert {(comparison.verdict, comparison.more_launches) for comparison in both} == {("inconclusive", 1)}


def test_a_walk_with_a_batch_that_diverged_has_no_ratio_at_any_batch_and_is_no_answer(tmp_path):
    """The fastest batches, 6 and 5, are never compared with one another."""
    largest = {"fsdp1_full": 6, "zero2": 5}
    machine = Machine(
        tmp_path, lambda cell: largest[cell.backend], BACKENDS, replace(LIMITED, launches=8), predicted=5, fastest=7
    )
    machine.run()
    assert compared(machine).walks[0].ratio > 1
    wrong = {"loss": [9.0, 8.0, 7.0]}
    (diverged,) = compared(machine, at_start=wrong).walks
    assert (diverged.verdict, diverged.ratio) == ("incomparable", None)
    assert diverged.reason.startswith("batch 2 is diverged: ")
    (box,) = build_report(machine.store.run(), records_of(machine, at_start=wrong)).answers
    assert box.lines[0].text.startswith("The only set-up of 2 that ended ok: backend=zero2 batch=5, ")
    assert box.lines[0].text.endswith("; 1 trained differently.")


@pytest.mark.parametrize(
    ("launches", "level", "text"),
    [
        (8, "ok", "Settled: 7 launches of each show every other one to be slower."),
        (1, "warning", "Not settled against backend=zero2 batch=4: 5 more launches of each could."),
    ],
)
def test_the_answer_compares_walks_at_the_fastest_batch_of_each(tmp_path, launches, level, text):
    """The other batches are launched once: they would be left unsettled for ever."""
    largest = {"fsdp1_full": 6, "zero2": 4}
    settings = replace(LIMITED, launches=launches)
    machine = Machine(tmp_path, lambda cell: largest[cell.backend], BACKENDS, settings, predicted=4, fastest=7)
    machine.run()
    (box,) = build_report(machine.store.run(), records_of(machine, speed=2)).answers
    assert box.lines[0].text.startswith("Fastest of 2 set-ups: backend=fsdp1_full batch=6, ")
    assert (box.lines[1].level, box.lines[1].text) == (level, text)


def test_a_set_up_whose_fastest_batch_does_not_always_fit_is_not_compared(tmp_path):
    machine = Machine(tmp_path, lambda _: 3, BACKENDS, replace(LIMITED, launches=3), predicted=3, fastest=3)
    machine.run()
    assert len(compared(machine).walks) == 1
    machine.store.write_record(example_record(replace(BACKENDS[0], batch=3), 2, status="oom", error=OOM))
    assert compared(machine).walks == ()


def test_the_figures_of_a_fastest_batch_are_those_of_the_launches_that_did_not_choose_it(machine):
    replace(machine, measure=replace(LIMITED, launches=4)).run()
    records = list(machine.store.records())
    for record in records:
        if record["launch"] == 1 and (throughput := record["throughput"]):
            record["throughput"] = throughput | {"global_samples_per_s": 1.2 * throughput["global_samples_per_s"]}
    run = machine.store.run()
    (result,) = certificates(run, summarize(run, records))
    repeated = repeats(result.fastest)
    speeds = [record["throughput"]["global_samples_per_s"] for record in records if record["cell_id"] == repeated.cell_id]
    assert repeated.values["global_samples_per_s"].value == pytest.approx(median(speeds[1:]))
    assert repeated.values["global_samples_per_s"].high < speeds[0]
    (box,) = build_report(run, records).answers
    assert f" {quantity(median(speeds[1:]), 'samples/s')}, " in box.lines[0].text


def test_at_a_batch_that_one_walk_repeats_and_the_other_does_not_only_the_searches_are_compared(tmp_path):
    largest = {"fsdp1_full": 6, "zero2": 4}
    settings = replace(LIMITED, launches=8)
    machine = Machine(tmp_path, lambda cell: largest[cell.backend], BACKENDS, settings, predicted=4, fastest=7)
    machine.run()
    (comparison,) = (pair for pair in compared(machine).cells.values() if pair.subject.cell["batch"] == 4)
    assert machine.store.record(comparison.reference.cell_id, 8) is not None, "the fastest batch of ZeRO-2"
    assert (comparison.effect.launches, comparison.is_search) == ((1, 1), True)
    repeat = machine.store.record(comparison.reference.cell_id, 8)
    machine.store.write_record(repeat | {"status": "crash", "error": OOM})
    (searches,) = (pair for pair in compared(machine).cells.values() if pair.subject.cell["batch"] == 4)
    assert searches.effect == comparison.effect, "how a repeat ended is not part of it"
