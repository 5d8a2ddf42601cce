"""A probe that fails after the measured steps costs none of their times, and the launch is not ok."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchbox.analysis.invariants import verify_records
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import Cell, DataSpec, MeasureSpec

POLICIES = Path(__file__).parents[1] / "policies"
MEASURE = MeasureSpec(warmup_steps=1, steps=2, launches=1, hang_after_s=5)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "status", "error", "rank"),
    [
        ("probe_killed", "crash", "Killed", 1),
        ("probe_out_of_memory", "oom", "RuntimeError", 0),
        ("probe_sleeps", "hang", "Hang", 1),
    ],
)
def test_a_launch_whose_probe_fails_keeps_its_measured_steps_and_is_not_ok(
    size: str, status: str, error: str, rank: int, tmp_path: Path
) -> None:
    cell = Cell(
        policy="faulty",
        size=size,
        backend="ddp",
        recipe="fp32",
        world_size=2,
        batch=2,
        data=DataSpec(kind="synthetic", workers=0),
    )
    launcher = ForkServerLauncher()
    record = launch_cell(cell, MEASURE, launch=1, folder=tmp_path, launcher=launcher, policy_dirs=[POLICIES])
    launcher.close()
    assert record["error"] is not None
    assert (record["status"], record["error"]["type"], record["error"]["rank"]) == (status, error, rank)
    assert record["error"].get("stage") == "probe"
    assert "the probe after them did not complete" in (record["unchecked_reason"] or "")
    assert record["step_time_s"] is not None
    assert [len(steps) for steps in record["step_time_s"]["per_rank"]] == [2, 2]
    assert min(record["step_time_s"]["slowest"]) > 0
    assert len(record["loss"] or []) == len(record["grad_norm"] or []) == 3
    assert record["samples"] == [4, 4]
    assert record["observed"] is not None
    assert (record["observed"]["backend"], record["observed"]["attention_kernel"]) == ("ddp", None)
    assert record["throughput"] is record["memory"] is record["flops"] is record["mfu"] is None
    # Steps of a few milliseconds on a busy machine: the time between their phases says nothing about a record of this kind.
    violations = [violation for violation in verify_records([record]).violations if "phases" not in violation.sentence]
    assert violations == []
