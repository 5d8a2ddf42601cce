"""`verify` accepts a verdict of an earlier look of `--launches auto` only if the launches of that look can have it."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchbox.analysis.invariants import verify_run
from benchbox.analysis.sequential import plan_looks
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MEASURE, MIB, example_run, steady_records
from tests.support.walks import START, Machine

SENTENCE = "pairs that an earlier look settled are so by their launches"
FASTER = replace(CELL, backend="zero2")
OTHER = replace(CELL, backend="zero1")


def messages(store):
    return [violation.message for violation in verify_run(store).violations if violation.sentence == SENTENCE]


def settled_run(folder, verdict, *, subject_s, last_s=None):
    """Write a run in which a look after launch 7 has settled a pair. The reference, at 0.2 s, went on to launch 10.

    Args:
        last_s: the step of three more launches of the subject, which an earlier command left; None without them.
    """
    run = example_run([CELL, FASTER, OTHER], reference={"backend": "ddp"}, measure=asdict(replace(MEASURE, launches=10)))
    pair = f"{FASTER.cell_id}/{CELL.cell_id}"
    sequential = {**plan_looks(run), "launches": {FASTER.cell_id: 7}, "settled": {pair: verdict}}
    store = RunStore(folder)
    store.write_run(replace(run, sequential=sequential))
    subject = steady_records(FASTER, step_s=subject_s, launches=7)
    if last_s is not None:
        subject += steady_records(FASTER, step_s=last_s, launches=10)[7:]
    for record in (*steady_records(CELL, step_s=0.2, launches=10), *steady_records(OTHER, step_s=0.2, launches=10), *subject):
        store.write_record(record)
    return store


@pytest.mark.parametrize(("subject_s", "verdict"), [(0.1, "improvement"), (0.4, "regression"), (0.2, "neutral")])
@pytest.mark.parametrize("last_s", [None, 0.25])
def test_the_verdict_of_the_launches_of_the_look_is_accepted(tmp_path, subject_s, verdict, last_s):
    store = settled_run(tmp_path, verdict, subject_s=subject_s, last_s=last_s)
    assert messages(store) == []


def test_a_pair_stays_neutral_in_a_plan_with_more_pairs_than_its_look_had(tmp_path):
    """Seven launches give no interval for eight pairs at once."""
    store = settled_run(tmp_path, "neutral", subject_s=0.2)
    run = store.run()
    more = [replace(CELL, backend=backend) for backend in ("fsdp1_full", "fsdp1_grad_op", "fsdp2", "hsdp", "zero3", "single")]
    store.write_run(replace(run, cells={**run.cells, **{cell.cell_id: cell.to_dict() for cell in more}}))
    assert messages(store) == []


@pytest.mark.parametrize(
    ("subject_s", "verdict", "shown"),
    [
        (0.2, "improvement", "ratio of 1.000 and p 1 "),
        (0.2, "regression", "ratio of 1.000 and p 1 "),
        (0.1, "regression", "ratio of 2.000 and p 0.00058 "),
        (0.1, "neutral", "ratio of 2.000 and p 0.00058 "),
        (0.1, "inconclusive", "ratio of 2.000 and p 0.00058 "),
        (0.4, "improvement", "ratio of 0.500 and p 0.00058 "),
        (0.198, "improvement", "ratio of 1.010 and p 0.00058 "),
    ],
)
def test_another_verdict_is_a_violation(tmp_path, subject_s, verdict, shown):
    store = settled_run(tmp_path, verdict, subject_s=subject_s)
    (message,) = messages(store)
    start = f"run.json: {FASTER.cell_id}/{CELL.cell_id} is settled as {verdict}, and its launches, up to that look, have a "
    assert message == f"{start}{shown}at an alpha of 0.0017"


def test_too_few_launches_for_any_p_settle_nothing(tmp_path):
    store = settled_run(tmp_path, "improvement", subject_s=0.1)
    run = store.run()
    few = replace(run, sequential={**run.sequential, "launches": {FASTER.cell_id: 4}})
    store.write_run(few)
    (message,) = messages(store)
    assert message.endswith("have a ratio of 2.000 and no p")


def test_a_pair_of_walks_is_settled_without_the_launches_that_searched(tmp_path):
    """The subject is the faster one in all launches but the first."""
    starts = (replace(START, backend="fsdp1_full"), replace(START, backend="zero2"))
    machine = Machine(
        tmp_path, lambda _: 3, starts, replace(MEASURE, launches=8, memory_limit=200 * MIB), predicted=3, fastest=3
    )
    machine.run()
    store, run = machine.store, machine.store.run()
    subject, reference = (walk["fastest"] for walk in run.walks)
    sequential = plan_looks(run, search=True)

    def settle(verdict):
        store.write_run(replace(run, sequential={**sequential, "settled": {f"{subject}/{reference}": verdict}}))
        return messages(store)

    assert len(settle("improvement")) == 1
    for number in range(2, 9):
        record = store.record(subject, number)
        times = record["step_time_s"]
        times["per_rank"] = [[step / 2 for step in steps] for steps in times["per_rank"]]
        times["slowest"] = [step / 2 for step in times["slowest"]]
        record["throughput"]["global_samples_per_s"] *= 2
        store.write_record(record)
    assert settle("improvement") == []
    assert len(settle("neutral")) == 1
    assert len(settle("regression")) == 1
