"""Merging the results of ranks into a launch record."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from benchbox.analysis.plausible_invariants import _worst_memory
from benchbox.registry.launch_record import LaunchRecord
from benchbox.registry.metrics import metrics
from benchbox.store.assemble import assemble_record
from benchbox.store.record import check_record
from tests.support.example_run import CELL, MEASURE, MIB, OOM, example_precision, example_record, rank_result
from tests.support.host_states import with_host

KEYS = LaunchRecord.__annotations__.keys()


def assemble(ranks, cell=CELL, status="ok", error=None):
    return assemble_record(
        cell=cell,
        launch=1,
        measure=MEASURE,
        rank_results=ranks,
        status=status,
        error=error,
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=1.0,
        environment=None,
        precision=example_precision(cell),
    )


def test_a_record_has_exactly_the_documented_keys():
    assert set(example_record()) == KEYS
    check_record(example_record(), "here")


def test_a_record_of_before_hfu_was_recorded_can_be_read():
    record = example_record()
    del record["hfu"], record["flops"]["per_tower"], record["flops"]["recomputed_flops_per_step"]
    check_record(record, "here")
    assert metrics()["hfu"].read(record) is None


def test_sizes_of_micro_batches_stay_by_rank_and_results_of_an_earlier_version_give_a_record_without_them():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    assert "micro_batch_sizes" not in assemble(ranks)["observed"]
    sizes = [{"prompt": {"smallest": 16, "largest": largest, "spec": 48}} for largest in (16, 48)]
    for rank, observed in zip(ranks, sizes, strict=True):
        rank["observed"] |= {"micro_batch_sizes": observed, "micro_batch_sizes_reason": None}
    record = assemble(ranks)
    assert record["status"] == "ok"
    assert record["observed"]["micro_batch_sizes"] == sizes


def test_the_step_time_is_that_of_the_slowest_rank_of_each_step_and_throughput_follows_from_it():
    fast, slow = rank_result(CELL, 0), rank_result(CELL, 1)
    fast["step_time_s"], slow["step_time_s"] = [0.1, 0.4, 0.1, 0.1], [0.2, 0.2, 0.2, 0.3]
    record = assemble([slow, fast])
    assert record["step_time_s"] == {"per_rank": [[0.1, 0.4, 0.1, 0.1], [0.2, 0.2, 0.2, 0.3]], "slowest": [0.2, 0.4, 0.2, 0.3]}
    assert record["throughput"]["global_samples_per_s"] == pytest.approx(2 * 1 * 2 / 0.25)
    assert record["throughput"]["per_rank_samples_per_s"] == pytest.approx([2 / 0.1, 2 / 0.2])


def test_accumulated_samples_count():
    cell = replace(CELL, accumulation=4)
    record = example_record(cell)
    expected = 2 * 4 * 2 / median(record["step_time_s"]["slowest"])
    assert record["throughput"]["global_samples_per_s"] == pytest.approx(expected)


def test_ranks_that_measured_different_numbers_of_steps_are_a_desync():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    ranks[1]["step_time_s"].pop()
    record = assemble(ranks)
    assert (record["status"], record["error"]["type"]) == ("desync", "DesyncError")
    assert record["throughput"] is None


def test_fewer_steps_than_requested_are_a_mismatch():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    for rank in ranks:
        rank["step_time_s"].pop()
    assert assemble(ranks)["error"]["message"] == "3 steps were measured and 4 requested"


def test_a_missing_rank_result_overrides_the_status_ok():
    record = assemble([rank_result(CELL, 1)])
    assert (record["status"], record["error"]["type"], record["error"]["rank"]) == ("crash", "MissingRank", 0)
    assert record["step_time_s"] is record["memory"] is record["loss"] is None


def test_ranks_that_observed_different_things_are_a_mismatch_that_names_them():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    ranks[1]["observed"]["sharding"] = "full"
    record = assemble(ranks)
    assert record["status"] == "mismatch"
    assert record["error"]["message"] == "ranks disagree on observed sharding: 'replicated' on rank 0, 'full' on rank 1"


def test_ranks_of_two_hosts_may_use_two_decoders():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    for rank, decoder in zip(ranks, ("pyav", "torchcodec"), strict=True):
        rank["observed"]["video_decoder"] = decoder
    record = assemble(ranks)
    assert record["status"] == "ok"
    assert record["observed"]["video_decoder"] == ["pyav", "torchcodec"]


def test_values_in_which_ranks_may_differ_are_recorded_per_rank():
    observed = example_record(cuda=True)["observed"]
    assert observed["shard_numel"] == [2001, 2001]
    assert observed["device"] == ["NVIDIA H200", "NVIDIA H200"]


def test_the_worst_rank_is_headlined_and_neither_peak_hides_behind_the_other():
    ranks = [rank_result(CELL, rank, cuda=True) for rank in range(2)]
    ranks[0]["memory"] |= {"allocated_peak_bytes": 300 * MIB, "reserved_peak_bytes": 310 * MIB}
    ranks[1]["memory"] |= {"allocated_peak_bytes": 100 * MIB, "reserved_peak_bytes": 400 * MIB}
    worst = assemble(ranks)["memory"]["worst"]
    assert worst == {"rank": 1, "allocated_peak_bytes": 300 * MIB, "reserved_peak_bytes": 400 * MIB}


def test_no_rank_is_the_worst_where_a_peak_is_unknown():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    ranks[1]["memory"]["allocated_peak_bytes"] = None
    record = assemble(ranks)
    assert record["memory"]["worst"] == {"rank": None, "allocated_peak_bytes": None, "reserved_peak_bytes": None}
    assert not list(_worst_memory(record))
    record["memory"]["worst"]["rank"] = 0
    assert list(_worst_memory(record)) == ["rank 0 is named as the worst, and the ranks have [157286400, None]"]


def test_unreserved_host_memory_stays_unknown_with_its_reason():
    memory = example_record()["memory"]
    assert memory["worst"] == {"rank": 1, "allocated_peak_bytes": 160 * MIB, "reserved_peak_bytes": None}
    assert memory["reason"]


def test_a_failed_launch_has_its_error_and_no_measurements():
    record = example_record(status="oom", error=OOM)
    assert record["error"] == OOM
    measured = (
        "observed",
        "step_time_s",
        "phases_s",
        "throughput",
        "memory",
        "collectives",
        "flops",
        "mfu",
        "hfu",
        "precision",
        "loss",
    )
    assert {key: record[key] for key in measured} == dict.fromkeys(measured)
    assert set(record) == KEYS


def test_a_failed_launch_whose_ranks_all_reported_keeps_the_evidence_but_quotes_no_throughput():
    record = assemble([rank_result(CELL, rank) for rank in range(2)], status="mismatch", error=OOM)
    assert record["observed"] is not None
    assert record["step_time_s"] is not None
    assert record["throughput"] is None


UNCHECKED = "the probe did not complete"


def unchecked_rank(rank):
    """Return the result of a rank as it is on disk before the probe."""
    unknown = dict.fromkeys(("memory", "collectives", "flops", "mfu", "hfu"))
    return rank_result(CELL, rank) | unknown | {"mfu_reason": "not counted", "unchecked_reason": UNCHECKED}


def test_a_launch_that_failed_after_its_timed_steps_keeps_their_times_and_says_that_they_are_unchecked():
    record = assemble([unchecked_rank(rank) for rank in range(2)], status="oom", error=OOM)
    assert (record["status"], record["error"], record["unchecked_reason"]) == ("oom", OOM, UNCHECKED)
    assert record["step_time_s"] == example_record()["step_time_s"]
    assert record["loss"] == example_record()["loss"]
    assert record["samples"] == [8, 8]
    unknown = ("throughput", "memory", "collectives", "flops", "mfu", "hfu")
    assert {key: record[key] for key in unknown} == dict.fromkeys(unknown)


def test_a_rank_that_was_not_checked_against_the_request_is_never_ok():
    record = assemble([rank_result(CELL, 0), unchecked_rank(1)])
    assert (record["status"], record["error"]["type"], record["error"]["rank"]) == ("crash", "UncheckedResult", 1)
    assert record["error"]["message"] == UNCHECKED
    assert record["throughput"] is None


def test_a_record_without_the_reason_can_be_read():
    record = example_record()
    del record["unchecked_reason"]
    check_record(record, "here")


def test_flops_are_added_up_over_ranks_and_utilisation_is_that_of_the_least_used():
    record = example_record(cuda=True)
    assert record["flops"] == {
        "model_flops_per_step": 2 * 10**9,
        "recomputed_flops_per_step": 4 * 10**8,
        "reason": None,
        "per_tower": {
            "vision": {"forward": 2 * 10**8, "backward": 4 * 10**8, "recomputed": 0},
            "backbone": {"forward": 4 * 10**8, "backward": 10**9, "recomputed": 4 * 10**8},
        },
    }
    assert (record["mfu"], record["hfu"], record["mfu_reason"]) == (pytest.approx(0.3), pytest.approx(0.4), None)


def test_flops_that_are_unknown_on_one_rank_are_unknown():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    ranks[1]["flops"] |= {
        "model_flops_per_step": None,
        "recomputed_flops_per_step": None,
        "reason": "unseen",
        "per_tower": None,
    }
    assert set(assemble(ranks)["flops"].values()) == {None, "unseen"}


def test_the_reason_for_no_formula_of_flops_is_that_of_the_ranks_and_absent_where_an_older_version_wrote_none():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    assert "per_tower_reason" not in assemble(ranks)["flops"]
    for reason in (None, "the policy declares no cost"):
        for result in ranks:
            result["flops"] |= {"per_tower": None, "per_tower_reason": reason}
        assert assemble(ranks)["flops"]["per_tower_reason"] == reason


def test_the_audit_result_is_recorded_unless_a_rank_is_missing():
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    assert assemble(ranks)["precision"] == example_precision(CELL)
    assert assemble(ranks[:1])["precision"] is None


def test_phases_of_all_ranks_are_recorded_and_fused_ones_are_named():
    record = example_record(replace(CELL, backend="zero2"))
    assert "clip" not in record["phases_s"]
    assert record["fused_phases"] == {"clip": "DeepSpeed clips inside its optimizer step"}
    assert [len(steps) for steps in record["phases_s"]["forward"]["per_rank"]] == [4, 4]


def test_a_record_of_before_the_host_was_recorded_can_be_read():
    record = example_record()
    del record["host"]
    check_record(record, "here")


def test_the_host_state_is_that_of_all_ranks_and_null_without_a_measurement():
    ranks = with_host([rank_result(CELL, rank) for rank in range(2)])
    assert assemble(ranks)["host"]["hosts"][0]["ranks"] == [0, 1]
    assert assemble(ranks[:1])["host"] is example_record(status="oom", error=OOM)["host"] is None


def test_samples_that_the_ranks_drew_of_each_dataset_are_added_up():
    ranks = [rank_result(CELL, rank) for rank in (0, 1)]
    for rank, drawn in zip(ranks, ([3, 5], [4, 1]), strict=True):
        datasets = [{"dataset": name, "drawn": number} for name, number in zip(("arm", "hand"), drawn, strict=True)]
        rank["data"] = {"kind": "lerobot", "mode": "policy", "validation": 0.0, "cameras": ["top"], "datasets": datasets}
    data = assemble(ranks)["data"]
    assert data["datasets"] == [{"dataset": "arm", "drawn": 7}, {"dataset": "hand", "drawn": 6}]
    assert (data["mode"], data["cameras"]) == ("policy", ["top"])
    del ranks[1]["data"]
    assert assemble(ranks)["data"] is None


def test_collectives_are_those_of_the_rank_with_most_calls_and_bytes():
    fewer, more = {"count": 2, "bytes": 1000}, {"count": 3, "bytes": 900}
    ranks = [rank_result(CELL, rank) for rank in range(2)]
    ranks[0]["collectives"] = {"all_reduce": more, "all_gather": fewer, "broadcast": {"count": 1, "bytes": 8}}
    ranks[1]["collectives"] = {"all_reduce": fewer, "all_gather": more}
    assert assemble(ranks)["collectives"] == {
        "all_reduce": {"count": 3, "bytes": 1000},
        "all_gather": {"count": 3, "bytes": 1000},
        "broadcast": {"count": 1, "bytes": 8},
    }


def test_the_memory_of_every_device_and_its_retries_are_recorded_where_a_rank_knows_them():
    ranks = [rank_result(CELL, rank, cuda=True) for rank in range(2)]
    for rank, (size, retries) in zip(ranks, ((190 * MIB, 0), (180 * MIB, 3)), strict=True):
        rank["memory"] |= {"device_bytes": size, "allocation_retries": retries}
    memory = assemble(ranks)["memory"]
    assert (memory["device_bytes"], memory["allocation_retries"]) == ([190 * MIB, 180 * MIB], [0, 3])
    assert "device_bytes" not in example_record()["memory"]
