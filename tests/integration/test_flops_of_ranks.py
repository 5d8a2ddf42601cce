"""The FLOPs, memory and collectives of a step in a record: counted on real ranks, and by formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchbox.analysis.invariants import verify_records
from benchbox.estimation import estimate
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import Cell, MeasureSpec
from tests.support.ranks import tiny_cell

pytestmark = pytest.mark.ranks


# gloo's thread holds the buffers of a collective until it has run once more, which on a busy machine is after the next tensors
# are allocated. That only ever adds to a peak, so the least of some launches is the one to compare.
LAUNCHES = 3


def launched(folder: Path, *policy_dirs: Path, **cell: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    measure = MeasureSpec(warmup_steps=1, steps=1, launches=1)
    launcher = ForkServerLauncher()
    record = launch_cell(tiny_cell(**cell), measure, launch=1, folder=folder, launcher=launcher, policy_dirs=policy_dirs)
    launcher.close()
    assert record["status"] == "ok", record["error"]
    return record


def test_the_formula_is_what_sharded_ranks_were_seen_to_do(tmp_path: Path) -> None:
    """Over two micro-batches, of which not every sample has every block; vision is frozen, and the rest is checkpointed."""
    cell = {"policy": "pi07_low_level", "backend": "fsdp2", "accumulation": 2, "checkpointing": True, "freeze": "freeze_vision"}
    record = launched(tmp_path, **cell)
    assert verify_records([record]).satisfied["FLOPs counted are those of the formula within 1%"] == 1
    flops, towers = record["flops"], record["flops"]["per_tower"]
    assert towers.keys() == {"vision", "backbone", "expert", "head"}
    assert sum(tower["forward"] + tower["backward"] for tower in towers.values()) == flops["model_flops_per_step"]
    assert sum(tower["recomputed"] for tower in towers.values()) == flops["recomputed_flops_per_step"]
    assert towers["vision"]["backward"] == towers["vision"]["recomputed"] == 0
    assert towers["backbone"]["recomputed"] > 0
    prediction = estimate(Cell.from_dict(record["cell"]))
    assert prediction.collectives == record["collectives"]
    predicted, peaks = pytest.approx(prediction.peak_bytes, rel=0.01), [record["memory"]["worst"]["allocated_peak_bytes"]]
    while min(peaks) != predicted and len(peaks) < LAUNCHES:
        again = launched(tmp_path / str(len(peaks)), **cell)
        peaks.append(again["memory"]["worst"]["allocated_peak_bytes"])
    assert min(peaks) == predicted, peaks


def test_a_policy_that_does_not_say_what_it_costs_is_counted_all_the_same(tmp_path: Path) -> None:
    alone = {"backend": "single", "world_size": 1}
    record = launched(tmp_path, Path(__file__).parent / "policies", policy="faulty", size="healthy", **alone)
    assert record["flops"]["per_tower"] is None
    assert record["flops"]["per_tower_reason"] == "the policy declares no cost: it has no method `work`"
    assert record["flops"]["model_flops_per_step"] > 0
