"""Each invariant detects the error it is for, and accepts a correct record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.analysis.invariants import INVARIANTS, verify_records
from benchbox.analysis.plausible_invariants import least_state_bytes
from benchbox.store.host_state import merge_host_state
from tests.support.example_run import CELL, MIB, OOM, example_record
from tests.support.host_states import quiet_state, rank_host
from tests.support.record_corruptions import LIMIT, PARTS


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
        calls["bytes"] = 1
    for peak in record["memory"]["per_rank"]:
        peak["allocated_peak_bytes"] = 1000
    record["memory"]["worst"]["allocated_peak_bytes"] = 1000
    tower = {"forward": record["flops"]["model_flops_per_step"], "backward": 10**12, "recomputed": 0}
    record["flops"]["per_tower"] = {"backbone": tower}
    sentences = {sentence for sentence, _ in violations(record)}
    expected = {"memory holds parameters, masters and moments", "FLOPs counted are those of the formula within 1%"}
    expected.add("collectives carry the gradients, and the parameters that are gathered")
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


def missing(record):
    """Return the keys that are null or empty without a reason."""
    sentence = "nothing is unknown without a reason"
    return [message.partition(" is ")[0] for found, message in violations(record) if found == sentence]


def test_a_null_without_a_reason():
    unmeasured = dict.fromkeys(("mfu", "hfu"))
    assert missing(example_record() | unmeasured | {"mfu_reason": None}) == ["mfu", "hfu"]
    assert missing(example_record() | unmeasured | {"mfu_reason": "the peak is unknown"}) == []
    record = example_record()
    record["memory"]["reason"] = None
    assert missing(record) == ["memory.reserved_peak_bytes"]
    record = example_record() | {"step_split_s": None, "step_split_reason": None}
    assert missing(record) == ["step_split_s"]


def test_what_is_unknown_for_a_reason_is_no_violation():
    record = example_record(replace(CELL, compile="blocks")) | {"compilation": {"per_rank": [{"graphs": 1}] * 2}}
    for peak in (*record["memory"]["per_rank"], record["memory"]["worst"]):
        peak["allocated_peak_bytes"] = None
    record["memory"]["worst"]["rank"] = None
    record["flops"] |= {"model_flops_per_step": None, "reason": "FlexAttention runs compiled"}
    record["flops"] |= {"per_tower": None, "per_tower_reason": "the policy declares no cost"}
    record["precision"] |= {"census": [], "problems": ["rank 0: the observer failed"]}
    record["observed"] |= {"attention_kernel": None, "attention_sites": {}}
    assert violations(record) == []


def test_a_record_from_before_a_key_need_not_have_it():
    record = example_record()
    for key in ("host", "data", "hfu", "step_split_s", "step_split_reason"):
        del record[key]
    assert "per_tower_reason" not in record["flops"]
    record["flops"]["per_tower"] = None
    assert violations(record) == []


def test_what_the_kernel_does_not_tell_of_a_host_has_a_reason():
    record = example_record() | {"host": quiet_state(window_s=0.9)}
    (host,) = record["host"]["hosts"]
    assert host["thermal_throttle_events"] is None
    assert missing(record) == []
    host["reasons"].clear()
    assert missing(record) == ["host.hosts.0.thermal_throttle_events"]


@pytest.mark.parametrize("figure", ["allocated_peak_bytes", "reserved_peak_bytes"])
def test_a_gpu_and_what_is_not_compiled_know_their_peaks_whatever_the_reason(figure):
    for record in (example_record(cuda=True), example_record()):
        record["memory"]["reason"] = "unknown"
        record["memory"]["per_rank"][1][figure] = None
        expected = figure == "allocated_peak_bytes" or record["memory"]["source"] == "torch.cuda"
        assert (f"memory.{figure}" in missing(record)) is expected


def test_steps_that_were_not_measured():
    record = example_record()
    record["loss"].pop()
    assert violations(record) == [("as many steps as asked for", "4 of 5 steps in loss")]


def test_a_record_edited_into_nonsense_is_a_violation_not_an_internal_error():
    messages = violations(example_record() | {"step_time_s": "fast", "memory": 3, "cell": {}})
    assert any("malformed" in text for _, text in messages)


POSITION = "an error is of a rank, stage, step and phase that there are"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 7}, "the error is of rank 7, of 2 ranks"),
        ({"rank": -1}, "the error is of rank -1, of 2 ranks"),
        ({"stage": "train"}, "the error is of stage train, and a launch has no such stage"),
        ({"step": 0}, "the error is of step 0 of stage warmup, of 1 steps"),
        ({"step": 2}, "the error is of step 2 of stage warmup, of 1 steps"),
        ({"stage": "measure", "step": 5}, "the error is of step 5 of stage measure, of 4 steps"),
        ({"stage": "probe", "step": 4}, "the error is of step 4 of stage probe, of 3 steps"),
        ({"stage": "build", "step": 1}, "the error is of step 1 of stage build, of 0 steps"),
        ({"phase": "thinking"}, "the error is of phase thinking, and a step has no such phase"),
        ({"ranks": [{"rank": 2, "stage": "warmup", "step": 1, "phase": None}]}, "the error is of rank 2, of 2 ranks"),
    ],
    ids=str,
)
def test_an_error_where_no_launch_has_been(changes, message):
    error = OOM | {"stage": "warmup", "step": 1}
    assert violations(example_record(status="oom", error=error)) == []
    assert violations(example_record(status="oom", error=error | changes)) == [(POSITION, message)]


@pytest.mark.parametrize("stage", [("prepare", None), ("measure", 4), ("measure", None), ("probe", 3), ("write", None)])
def test_an_error_may_be_in_every_stage_of_a_launch(stage):
    error = OOM | dict(zip(("stage", "step"), stage, strict=True)) | {"phase": "torch.compile"}
    assert violations(example_record(status="oom", error=error)) == []


@pytest.mark.parametrize("cuda", [False, True])
def test_a_memory_limit_below_a_peak(cuda):
    record = example_record(cuda=cuda)
    peak = max(max(peak.values()) if cuda else peak["allocated_peak_bytes"] for peak in record["memory"]["per_rank"])
    assert violations(record | {"memory_limit_bytes": peak}) == []
    low = int(peak * 0.98)
    message = f"rank 1: {peak} bytes at the peak, and the limit under which it ran is {low}"
    assert violations(record | {"memory_limit_bytes": low}) == [(LIMIT, message)]
    within = violations(record | {"memory_limit_bytes": int(peak * 0.995)})
    assert bool(within) is cuda, "a host is held to its limit in the warm-up only"


@pytest.mark.parametrize("changes", [{"padding": "longest"}, {"optim": replace(CELL.optim, freeze_backbone_steps=1)}], ids=str)
def test_a_host_may_need_more_than_its_limit_where_later_steps_need_more(changes):
    record = example_record(replace(CELL, **changes)) | {"memory_limit_bytes": MIB}
    assert LIMIT not in [sentence for sentence, _ in violations(record)]


def split_record():
    """Return a record whose ranks compute for a part of each step and wait for the rest."""
    record = example_record()
    shares = {"data_wait": 0.1, "compute": 0.5, "core_wait": 0.0, "rank_wait": 0.3, "transfer": 0.1}
    ranks = record["step_time_s"]["per_rank"]
    split = {part: {"per_rank": [[share * step for step in steps] for steps in ranks]} for part, share in shares.items()}
    return record | {"step_split_s": split, "step_split_reason": None}


@pytest.mark.parametrize(("factor", "is_broken"), [(1.0, False), (0.99, True), (1.03, False), (1.05, True)])
def test_parts_add_up_to_their_step_of_every_rank(factor, is_broken):
    record = split_record()
    steps = record["step_split_s"]["compute"]["per_rank"][1]
    steps[2] *= factor  # of a part that is half of the step
    found = violations(record)
    assert bool(found) is is_broken
    if is_broken:
        ((sentence, message),) = found
        assert sentence == PARTS
        assert message.startswith("rank 1: step 2 took ")


def test_parts_that_a_step_does_not_have():
    record = split_record()
    del record["step_split_s"]["transfer"]
    assert violations(record) == [(PARTS, "a step has the parts data_wait, compute, core_wait, rank_wait")]
    record = split_record()
    for part, change in (("compute", -1.0), ("transfer", 1.0)):
        record["step_split_s"][part]["per_rank"][0][0] += change
    assert violations(record) == [(PARTS, "rank 0: a part is negative, or of other steps")]
    record = split_record()
    record["step_split_s"]["compute"]["per_rank"][0].pop()
    assert violations(record) == [(PARTS, "rank 0: a part is negative, or of other steps")]


@pytest.mark.parametrize(
    "key",
    [
        *("observed", "step_time_s", "phases_s", "throughput", "memory", "collectives", "flops", "precision", "samples"),
        *("host", "data", "loss", "grad_norm", "environment"),
    ],
)
def test_what_every_ok_launch_has_is_not_null(key):
    found = violations(example_record() | {key: None})
    assert ("nothing is unknown without a reason", f"{key} is null without a reason") in found


def test_fewer_step_times_than_steps():
    record = example_record()
    for steps in (*record["step_time_s"]["per_rank"], record["step_time_s"]["slowest"]):
        steps.pop()
    assert ("as many steps as asked for", "3 step times, 4 steps") in violations(record)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [28014, 28014]),  # (2 + 4 + 2 * 4) * 2001
        ({"recipe": "fp32"}, [24012, 24012]),  # (4 + 2 * 4) * 2001
        ({"backend": "zero2"}, [16002, 16014]),  # 2 * 2001 + (4 + 2 * 4) * shard
        ({"backend": "zero3"}, [14000, 14014]),  # (2 + 4 + 2 * 4) * shard
        ({"backend": "fsdp2"}, [12000, 12012]),  # (4 + 2 * 4) * shard
    ],
    ids=str,
)
def test_the_least_memory_of_a_rank_is_that_of_its_parameters_masters_and_moments(changes, expected):
    """Rank 0 has 1000 of 2001 elements where they are sharded, and rank 1 has 1001."""
    assert least_state_bytes(example_record(replace(CELL, **changes))) == expected


@pytest.mark.parametrize(
    ("mode", "graphs", "message"),
    [
        ("blocks", [1], "requested blocks, observed [1] graphs by rank"),
        ("blocks", None, "requested blocks, observed no graphs by rank"),
        ("blocks", [1, 0], "requested blocks, observed [1, 0] graphs by rank"),
    ],
)
def test_a_compilation_that_was_not_requested_or_did_not_happen(mode, graphs, message):
    compilation = None if graphs is None else {"per_rank": [{"graphs": number} for number in graphs]}
    record = example_record(replace(CELL, compile=mode)) | {"compilation": compilation}
    assert ("compilation is as requested", message) in violations(record)


def test_what_a_rank_compiles_by_itself_does_not_contradict_that_nothing_was_requested():
    """torch may also give up all that it was to compile."""
    record = example_record(CELL) | {"compilation": {"per_rank": [{"graphs": 1}, {"graphs": 0}]}}
    assert not [message for name, message in violations(record) if name == "compilation is as requested"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "zero3", "checkpointing": True}, "zero3 refuses activation checkpointing"),
        ({"backend": "zero2", "recipe": "bf16_kahan"}, "zero2 has no recipe bf16_kahan"),
    ],
)
def test_an_ok_launch_of_a_cell_that_its_backend_refuses(changes, message):
    assert ("the backend can run such a cell", message) in violations(example_record(replace(CELL, **changes)))
