"""Each invariant detects the error it is for, and accepts a correct record."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchbox.analysis.invariants import INVARIANTS, verify_records, verify_run
from benchbox.report.markdown import render_markdown
from benchbox.report.view import build_report
from benchbox.store.host_state import merge_host_state
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MEASURE, MIB, OOM, example_record, example_run
from tests.support.host_states import rank_host


def violations(record):
    return [(violation.sentence, violation.message) for violation in verify_records([record]).violations]


@pytest.mark.parametrize("cuda", [False, True])
def test_a_truthful_record_violates_nothing(cuda):
    records = [example_record(cuda=cuda), example_record(replace(CELL, backend="zero2", accumulation=3), cuda=cuda)]
    result = verify_records(records)
    assert result.violations == ()
    assert sum(result.satisfied.values()) + sum(result.not_applicable.values()) == 2 * len(INVARIANTS)


def test_a_failed_launch_has_nothing_to_check_but_its_error():
    assert violations(example_record(status="oom", error=OOM)) == []
    assert violations(example_record(status="crash")) == [
        ("nothing is unknown without a reason", "not ok, and no error says why")
    ]


def test_an_ok_launch_that_was_not_checked_against_the_request():
    unchecked = {"unchecked_reason": "the probe did not complete"}
    assert violations(example_record() | unchecked) == [
        ("what is ok was checked against the request", "the probe did not complete")
    ]
    assert violations(example_record(status="oom", error=OOM) | unchecked) == []


@pytest.mark.parametrize("skipped", [[2], []])
def test_a_loss_that_is_not_finite_is_of_a_step_that_was_skipped(skipped):
    record = example_record() | {"skipped_steps": skipped}
    record["loss"][2] = record["grad_norm"][2] = None
    broken = [f"{name} of step 2 is not a finite number" for name in ("loss", "grad_norm")]
    assert [message for _, message in violations(record)] == ([] if skipped else broken)


@pytest.mark.parametrize("freeze_steps", [0, 1000])
def test_a_backbone_that_was_frozen_all_the_time_has_no_moments_and_less_work_and_reduces_nothing(freeze_steps):
    cell = replace(CELL, optim=replace(CELL.optim, freeze_backbone_steps=freeze_steps))
    record = example_record(cell)
    for entry in record["precision"]["census"]:
        if entry["kind"] == "exp_avg":
            entry |= {"elements": entry["elements"] // 2, "bytes": entry["elements"] // 2 * 4}
    for calls in record["collectives"].values():
        calls["bytes"] //= 2
    for peak in record["memory"]["per_rank"]:
        peak["allocated_peak_bytes"] = 1000
    record["memory"]["worst"]["allocated_peak_bytes"] = 1000
    tower = {"forward": record["flops"]["model_flops_per_step"], "backward": 10**12, "recomputed": 0}
    record["flops"]["per_tower"] = {"backbone": tower}
    sentences = {sentence for sentence, _ in violations(record)}
    expected = {"memory holds parameters, masters and moments", "FLOPs counted are those of the formula within 1%"}
    assert (sentences >= expected) if freeze_steps == 0 else not sentences


def test_a_record_from_before_backbones_could_be_frozen_is_checked_like_any_other():
    record = example_record(replace(CELL, backend="zero2"))
    for written in (record["cell"], record["config"]):
        written["optim"].pop("freeze_backbone_steps", None)
    assert violations(record) == []


def test_reserved_below_allocated():
    record = example_record(cuda=True)
    record["memory"]["per_rank"][0]["reserved_peak_bytes"] = 100 * MIB
    ((sentence, message),) = violations(record)
    assert sentence == "reserved >= allocated memory, on every rank"
    assert message.startswith("rank 0: ")


@pytest.mark.parametrize(("share", "broken"), [(0.99, False), (0.97, True), (1.01, False), (1.03, True)])
def test_phases_that_do_not_sum_to_the_step_within_two_percent(share, broken):
    record = example_record()
    for phase in record["phases_s"].values():
        phase["per_rank"][1] = [time * share for time in phase["per_rank"][1]]
    messages = violations(record)
    assert bool(messages) is broken
    if broken:
        assert messages[0][0] == "phases sum to the step within 2%, on every rank; on a host that may be busy to no more"
        assert messages[0][1].startswith("rank 1: phases take")


@pytest.mark.parametrize("busy_s", [9.9, None], ids=["busy", "unknown"])
@pytest.mark.parametrize(("share", "broken"), [(0.9, False), (1.03, True)])
def test_on_a_host_that_may_be_busy_other_processes_may_run_between_phases(busy_s, share, broken):
    def with_host(busy_s):
        results = [{"rank": rank, "samples": 8, "host": rank_host(rank, busy_s=busy_s)} for rank in range(2)]
        record = example_record() | {"host": merge_host_state(results)}
        for phase in record["phases_s"].values():
            phase["per_rank"][1] = [time * share for time in phase["per_rank"][1]]
        return record

    assert bool(violations(with_host(busy_s))) is broken
    assert violations(with_host(8.2)), "the host was quiet"


def test_a_missing_rank():
    record = example_record()
    record["memory"]["per_rank"].pop()
    assert ("every rank is present", "memory has 1 of 2 ranks") in violations(record)


def test_a_world_size_that_was_not_requested():
    record = example_record()
    record["observed"]["world_size"] = 1
    assert violations(record) == [("the world size observed is the one requested", "observed 1, requested 2")]


def test_samples_that_were_lost():
    record = example_record()
    record["samples"][1] -= 2
    assert violations(record) == [("samples = batch x accumulation x ranks x steps", "14 samples counted, 16 expected")]


def test_a_fast_rank_reported_as_the_slowest():
    record = example_record()
    record["step_time_s"]["slowest"] = list(record["step_time_s"]["per_rank"][0])
    sentences = [sentence for sentence, _ in violations(record)]
    assert "slowest = maximum over ranks, step by step" in sentences
    assert "throughput follows from the slowest rank's step times" in sentences


def test_throughput_multiplied_by_the_number_of_steps():
    record = example_record()
    record["throughput"]["global_samples_per_s"] *= record["steps"]
    assert [sentence for sentence, _ in violations(record)] == ["throughput follows from the slowest rank's step times"]


def test_an_mfu_above_one():
    record = example_record()
    record |= {"mfu": 1.33, "hfu": 1.5}
    sentence = "MFU and HFU are between 0 and 1, or null"
    assert violations(record) == [(sentence, "MFU 1.330"), (sentence, "HFU 1.500")]


def test_a_count_that_is_not_what_the_formula_says():
    """One of them is wrong. A percent may lie between; without a formula there is nothing to hold the count against."""
    sentence = "FLOPs counted are those of the formula within 1%"
    record = example_record()
    record["flops"]["model_flops_per_step"] *= 1.009
    assert violations(record) == []
    record["flops"] |= {"model_flops_per_step": 2.04e9, "recomputed_flops_per_step": 0}
    assert violations(record) == [
        (sentence, "2.04e+09 model FLOPs counted, 2e+09 by formula"),
        (sentence, "0 recomputed FLOPs counted, 4e+08 by formula"),
    ]
    record["flops"]["per_tower"] = None
    assert violations(record) == []


@pytest.mark.parametrize(("key", "reason_key"), [("mfu", "mfu_reason"), ("memory.reserved_peak_bytes", "memory")])
def test_a_null_without_a_reason(key, reason_key):
    record = example_record()
    if reason_key == "memory":
        record["memory"]["reason"] = None
    else:
        record[reason_key] = None
    assert violations(record) == [("nothing is unknown without a reason", f"{key} is null without a reason")]


def test_steps_that_were_not_measured():
    record = example_record()
    record["loss"].pop()
    assert violations(record) == [("as many steps as asked for", "4 of 5 steps in loss")]


def test_a_record_edited_into_nonsense_is_a_violation_not_an_internal_error():
    messages = violations(example_record() | {"step_time_s": "fast", "memory": 3, "cell": {}})
    assert any("malformed" in text for _, text in messages)


def test_a_report_that_was_cut_to_what_github_shows_violates_nothing(tmp_path):
    names = [f"p{number:02}{'x' * 1500}" for number in range(30)]
    cells = [replace(CELL, backend=backend, policy=name) for name in names for backend in ("zero2", "ddp")]
    store = RunStore(tmp_path)
    store.write_run(example_run(cells, measure=asdict(MEASURE) | {"launches": 1}))
    for cell in cells:
        store.write_record(example_record(cell))
    text = render_markdown(build_report(store.run(), store.records()))
    assert "more: report.html" in text
    (tmp_path / "report.md").write_text(text)
    sentence = "ratios of the report follow from the records"
    assert [violation for violation in verify_run(store).violations if violation.sentence == sentence] == []
