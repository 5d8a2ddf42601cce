"""Sentences of a report on the shares of the measured peaks that forward, backward and the optimizer reach."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run, shard_numel
from tests.support.peaks import made_up_peaks, rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.spec.cell import Cell
    from benchbox.store.peaks import MeasuredPeaks

GROUP = "2 cpu ranks with 1 thread"
NAME = "share of the peaks"


def timed_record(cell: Cell = CELL, launch: int = 1, *, gradients: str = "bfloat16") -> Any:
    """Return a record of two ranks with one thread each that fused AdamW stepped, and whose phases take tenths of a second."""
    record: Any = deepcopy(example_record(cell, launch=launch))
    record["environment"] |= {"threads": 1}
    record["observed"]["settings"] = {"optimizer_fused": True}
    for rank in range(2):
        elements = shard_numel(cell, rank)
        entry = {"rank": rank, "device": "cpu", "tensors": 3, "elements": elements, "bytes": elements * 4}
        record["precision"]["census"] += [
            entry | {"kind": "gradient", "dtype": gradients},
            entry | {"kind": "product", "dtype": "bfloat16"},
        ]
    steps = len(record["step_time_s"]["slowest"])
    for phase, seconds in {"forward": 0.1, "backward": 0.2, "optimizer": 0.01}.items():
        record["phases_s"][phase] = {"per_rank": [[seconds] * steps] * 2}
    return record


def lines_of(record: Any, measured: Mapping[str, MeasuredPeaks] | None = None, cell: Cell = CELL) -> list[str]:
    """Return what the report of a run of one cell says of the peaks; by default those of its ranks were measured."""
    peaks = {GROUP: slow_device()} if measured is None else measured
    report = build_report(example_run([cell]), [record], peaks=lambda _: peaks)
    return [item.observed for item in report.observed[0].observations if item.name == NAME]


def slow_device() -> MeasuredPeaks:
    """Return peaks of 5 GFLOP/s in bfloat16 and 20 MB/s of memory, which the work of an example reaches a part of."""
    slow = replace(made_up_peaks(), update=rate(2e7), copy=rate(1e7))
    slow.matmul["bfloat16"] = {"large": rate(5e9), "thin": rate(1e9)}
    return slow


def test_forward_backward_and_the_optimizer_have_shares_of_what_the_device_can_do() -> None:
    """Shares by hand, on each of two ranks: 300 MFLOP of forward in 0.1 s; 900 of backward, 200 of them recomputed, in 0.2 s.

    Products reach 5 GFLOP/s in bfloat16. DDP steps 2001 elements of 28 bytes on each rank in 10 ms, and memory has 20 MB/s.
    """
    (line,) = lines_of(timed_record())
    assert line == (
        "on each rank, forward runs at 60% (3.00 GFLOP/s) and backward, recomputation included, at 90% (4.50 GFLOP/s) of what "
        "this device can do in products (5.00 GFLOP/s in bfloat16), the optimizer at 28% (5.34 MiB/s) of what its memory can "
        "do (19.1 MiB/s)"
    )


def test_shares_are_of_the_mean_step_over_launches() -> None:
    records = [timed_record(launch=launch) for launch in (1, 2)]
    steps = len(records[1]["step_time_s"]["slowest"])
    records[1]["phases_s"]["forward"] = {"per_rank": [[0.3] * steps] * 2}
    report = build_report(example_run([CELL]), records, peaks=lambda _: {GROUP: slow_device()})
    (line,) = [item.observed for item in report.observed[0].observations if item.name == NAME]
    assert line.startswith("on each rank, forward runs at 30% (1.50 GFLOP/s) and backward")


def test_backward_without_recomputation_has_the_rest_of_the_counted_flops() -> None:
    record = timed_record()
    record["flops"]["recomputed_flops_per_step"] = 0
    for tower in record["flops"]["per_tower"].values():
        tower["recomputed"] = 0
    assert "(3.00 GFLOP/s) and backward at 70% (3.50 GFLOP/s) of" in lines_of(record)[0]


@pytest.mark.parametrize(
    ("flops", "reason"),
    [
        ({"per_tower": None, "per_tower_reason": "the policy declares no cost"}, "the policy declares no cost"),
        ({"per_tower": None}, "no formula of the policy was recorded"),
        (
            {"model_flops_per_step": 22 * 10**8},
            "the formula of the policy gives 2.40 GFLOP for a step, and 2.60 GFLOP were counted",
        ),
        (
            {"recomputed_flops_per_step": 0},
            "the formula of the policy gives 2.40 GFLOP for a step, and 2.00 GFLOP were counted",
        ),
    ],
)
def test_forward_and_backward_have_one_share_where_no_formula_divides_what_was_counted(flops: Any, reason: str) -> None:
    record = timed_record()
    record["flops"] |= flops
    share, why = lines_of(record)
    assert share.startswith("on each rank, forward and backward")
    assert " run at " in share
    assert why == f"the FLOPs of forward and backward are not known apart: {reason}"


def test_a_rate_above_the_peak_has_a_reason_in_place_of_its_share_and_the_others_keep_theirs() -> None:
    """Forward reaches 3 GFLOP/s, backward 4.5."""
    slow = replace(slow_device(), matmul={"bfloat16": {"large": rate(4e9)}})
    share, why = lines_of(timed_record(), {GROUP: slow})
    assert share.startswith("on each rank, forward runs at 75% (3.00 GFLOP/s) of what this device can do in products")
    assert why == "the share of backward is unknown: 1.12 of the peak is impossible: measure the peaks again on a quiet machine"


def test_an_optimizer_that_finds_its_tensors_in_caches_has_that_reason() -> None:
    share, why = lines_of(timed_record(), {GROUP: replace(slow_device(), update=rate(1e6), copy=rate(1e6))})
    assert "optimizer" not in share
    assert why == "the share of the optimizer is unknown: 5.60 of the rate of memory: operations find their operands in caches"


def test_without_peaks_of_its_ranks_a_cell_has_the_command_that_measures_them() -> None:
    command = "benchbox doctor --peaks --ranks 2 measures them on the machine of the run"
    missing = [f"unknown: no peaks were measured for {GROUP}; {command}"]
    assert lines_of(timed_record(), {}) == missing
    assert lines_of(timed_record(), {"4 cpu ranks with 1 thread": made_up_peaks(4)}) == missing


def test_a_report_that_is_given_no_peaks_says_nothing_of_them() -> None:
    report = build_report(example_run([CELL]), [timed_record()])
    assert NAME not in {item.name for item in report.observed[0].observations}


def test_a_cell_that_did_not_end_ok_has_no_shares() -> None:
    record = timed_record() | {"status": "crash"}
    assert lines_of(record) == []


def test_a_launch_that_did_not_record_its_threads_has_that_reason() -> None:
    record = timed_record()
    del record["environment"]["threads"]
    assert lines_of(record) == ["unknown: the device or the threads of the launch were not recorded"]


@pytest.mark.parametrize(
    ("fused", "unknown", "known"),
    [
        ({"optimizer": "steps in backward"}, "unknown: optimizer has no time of its own: steps in backward", ""),
        (
            {"clip": "DeepSpeed clips inside its step"},
            "the share of the optimizer is unknown: clip has no time of its own, and may be a part of that of the optimizer",
            "forward runs at",
        ),
    ],
)
def test_a_phase_that_may_contain_another_one_has_no_share(fused: Any, unknown: str, known: str) -> None:
    lines = lines_of(timed_record() | {"fused_phases": fused})
    assert lines[-1] == unknown
    assert known in lines[0]
    assert len(lines) == (2 if known else 1)


def test_steps_that_do_less_than_others_have_no_share() -> None:
    frozen = replace(CELL, optim=replace(CELL.optim, freeze_backbone_steps=100))
    reason = "the backbone is frozen in measured steps (optim.freeze_backbone_steps)"
    assert lines_of(timed_record(frozen), cell=frozen) == [f"unknown: {reason}"]
    skipping = timed_record()
    skipping["skipped_steps"] = [skipping["warmup_steps"]]
    share, why = lines_of(skipping)
    assert "backward" in share
    assert why == (
        "the share of the optimizer is unknown: optim.spike skipped measured steps, which lack the update of the weights"
    )


def test_products_in_two_dtypes_have_no_share_since_their_flops_were_not_recorded_by_dtype() -> None:
    record = timed_record()
    record["precision"]["census"].append(record["precision"]["census"][-1] | {"dtype": "float32"})
    share, why = lines_of(record)
    assert share.startswith("on each rank, the optimizer runs at 28%")
    assert why == (
        "the share of forward and backward is unknown: products ran in bfloat16 and float32, and their FLOPs were not recorded "
        "by dtype"
    )


def test_flops_that_were_not_counted_have_the_reason_of_the_record() -> None:
    record = timed_record()
    record["flops"] |= {"model_flops_per_step": None, "reason": "FlexAttention runs compiled"}
    assert lines_of(record)[1] == "the share of forward and backward is unknown: FlexAttention runs compiled"


def test_products_in_float32_of_a_gpu_have_no_share_since_they_may_be_in_tf32() -> None:
    cell = replace(CELL, recipe="fp32")
    peaks = {"2 cuda ranks": replace(slow_device(), device="cuda")}
    for recipe_cell, is_known in ((CELL, True), (cell, False)):
        record = timed_record(recipe_cell)
        record["observed"]["device"] = ["NVIDIA H200"] * 2
        for entry in record["precision"]["census"]:
            if entry["kind"] == "product":
                entry["dtype"] = "bfloat16" if is_known else "float32"
        lines = lines_of(record, peaks, recipe_cell)
        assert lines[0].startswith("on each rank, forward runs at 60%") == is_known
        assert any("may run products of float32 in TF32" in line for line in lines) != is_known


def without_census(record: Any, kind: str) -> None:
    record["precision"]["census"] = [entry for entry in record["precision"]["census"] if entry["kind"] != kind]


def test_old_records_have_reasons_for_what_they_do_not_say() -> None:
    record = timed_record()
    without_census(record, "product")
    assert lines_of(record)[1] == "the share of forward and backward is unknown: the dtype of products was not recorded"
    without_census(record, "gradient")
    del record["observed"]["settings"], record["flops"]["recomputed_flops_per_step"]
    assert lines_of(record) == [
        "the share of forward and backward is unknown: FLOPs that are recomputed were not recorded",
        "the share of the optimizer is unknown: it was not recorded whether AdamW is fused",
    ]
    record["flops"] = None
    assert "FLOPs were not recorded" in lines_of(record)[0]
    record["precision"] = None
    assert "the tensors of the optimizer were not recorded" in lines_of(record)[1]


def test_the_bytes_of_other_updates_than_a_fused_adamw_in_float32_are_not_known() -> None:
    def reason(record: Any) -> str:
        (line,) = [line for line in lines_of(record) if line.startswith("the share of the optimizer is unknown: ")]
        return line.removeprefix("the share of the optimizer is unknown: ")

    other, unfused, low, full = timed_record(), timed_record(), timed_record(), timed_record(gradients="float32")
    other["observed"]["optimizer_chain"][-1] = "Muon"
    assert reason(other) == "the bytes that Muon reads and writes are not known"
    unfused["observed"]["settings"]["optimizer_fused"] = None
    assert reason(unfused).startswith("AdamW is not fused")
    for entry in low["precision"]["census"]:
        if entry["kind"].startswith("exp_avg"):
            entry["dtype"] = "bfloat16"
    assert reason(low) == "the bytes of AdamW are known for moments in float32, and these are in bfloat16"
    assert reason(full) == "the bytes of AdamW are not known for gradients in float32 with masters"


def test_adamw_without_masters_moves_as_many_bytes_with_gradients_in_float32() -> None:
    record = timed_record(gradients="float32")
    without_census(record, "master")
    assert "the optimizer at 28% (5.34 MiB/s)" in lines_of(record)[0]


def test_peaks_of_another_torch_are_named() -> None:
    _, line = lines_of(timed_record(), {GROUP: replace(slow_device(), torch="2.12.0")})
    assert (
        line
        == "the peaks are those of torch 2.12.0, and the steps of torch 2.13.0: benchbox doctor --peaks measures them again"
    )


def test_uncertain_peaks_are_named_where_the_cell_uses_them() -> None:
    """Products in float32, of which none ran, may be as uncertain as they will."""
    peaks = slow_device()
    peaks.matmul["float32"]["thin"]["spread"] = 0.4
    assert len(lines_of(timed_record(), {GROUP: peaks})) == 1
    peaks.matmul["bfloat16"]["thin"]["spread"] = 0.3
    _, line = lines_of(timed_record(), {GROUP: peaks})
    assert line == (
        "the peaks are uncertain: repetitions differ in bfloat16 thin by 30%; run benchbox doctor --peaks again when nothing "
        "else runs on this machine"
    )


def test_a_launch_in_which_no_rank_reported_is_of_no_other_machine() -> None:
    """Its environment has only what the launcher knows. Every walk ends with such a launch, which ran out of memory."""
    other = replace(CELL, batch=CELL.batch + 1)
    records = [timed_record(), timed_record(other)]
    records[1]["environment"] = {"launcher": "torchrun"}
    report = build_report(example_run([CELL, other]), records, peaks=lambda _: {GROUP: slow_device()})
    assert "backward" in {item.name: item.observed for item in report.observed[0].observations}[NAME]


def test_a_run_with_launches_of_two_machines_has_no_shares() -> None:
    """The cells of one would show their share of the peak of the other."""
    cells = [CELL, replace(CELL, cams=CELL.cams + 1)]

    def lines(*machines: str) -> list[str]:
        records = [timed_record(cell) for cell in cells]
        for record, machine in zip(records, machines, strict=True):
            record["environment"] |= {"machine": machine}
        report = build_report(example_run(cells), records, peaks=lambda _: {GROUP: slow_device()})
        return [item.observed for cell in report.observed for item in cell.observations if item.name == NAME]

    assert all("forward runs at" in line for line in lines("a", "a"))
    assert lines("a", "b") == ["unknown: the launches of the run name no machine, or several"] * 2
