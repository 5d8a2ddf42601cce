"""Sizes of batches and FLOPs of a cell whose batches differ in shape from step to step are those of its measured steps."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.analysis.invariants import FLOPS_TOLERANCE
from benchbox.errors import MismatchError
from benchbox.estimation import Estimator
from benchbox.measure.flops import DEVICE_PEAKS
from benchbox.measure.phases import ProgressTracker
from benchbox.session.build import build_cell_policy, copy_meta_policy, open_cell_data
from benchbox.spec.cell import DataSpec, MeasureSpec
from benchbox.store.events import EventWriter
from benchbox.store.files import read_json
from benchbox.theory.flops import Cost, sum_costs, total_cost, training_cost
from benchbox.worker import measuring
from benchbox.worker.measuring import measure
from tests.support.datasets import write_unequal_robots
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.spec.cell import Cell

MEASURE = MeasureSpec(warmup_steps=1, steps=6, launches=1)
ACCUMULATION = 2
PEAK = 1e13


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return write_unequal_robots(tmp_path_factory.mktemp("robots"))


@pytest.fixture(autouse=True)
def _known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up peak: none is known for a CPU."""
    monkeypatch.setitem(DEVICE_PEAKS, "this cpu", PEAK)


def cell_of(robots: DataSpec, **changes: Any) -> Cell:
    alone = {"backend": "single", "world_size": 1, "batch": 1, "cams": 3, "accumulation": ACCUMULATION, "data": robots}
    return tiny_cell(**(alone | {"padding": "longest"} | changes))


def measured(cell: Cell, folder: Path) -> dict[str, Any]:
    job: Any = {"cell": cell.to_dict(), "measure": asdict(MEASURE), "policy_dirs": [], "launch": 1}
    measure(job, folder, 0, ProgressTracker(), EventWriter(folder / "events", 0))
    return read_json(folder / "rank0.json")


def costs_by_step(cell: Cell) -> list[Cost]:
    """Return the cost of each step up to the probed one, by the formula and the batches themselves."""
    policy = build_cell_policy(cell)
    formula = copy_meta_policy(cell, policy)
    with closing(open_cell_data(cell, policy, 0)) as stream:
        steps = [list(islice(stream, ACCUMULATION)) for _ in range(MEASURE.probed_step + 1)]
    return [total_cost(sum_costs(training_cost(formula.work(batch)) for batch in step)) for step in steps]


@pytest.mark.parametrize(("policy", "kind"), [("pi05", "lerobot"), ("pi07_low_level", "synthetic")])
def test_they_are_the_mean_of_the_measured_steps_and_no_figure_of_another_step(
    policy: str, kind: str, robots: DataSpec, tmp_path: Path
) -> None:
    """Some generated samples lack optional parts, and pi07 drops others: its steps differ in their blocks too."""
    data = robots if kind == "lerobot" else DataSpec(kind=kind, workers=0)
    cell = cell_of(data, policy=policy, checkpointing=True)
    result, costs = measured(cell, tmp_path), costs_by_step(cell)
    steps = costs[MEASURE.warmup_steps : MEASURE.warmup_steps + MEASURE.steps]
    assert len({cost.model for cost in steps}) > 1, "all steps have the same FLOPs"
    flops, towers = result["flops"], result["flops"]["per_tower"].values()
    mean, recomputed = fmean(cost.model for cost in steps), fmean(cost.recomputed for cost in steps)
    assert flops["model_flops_per_step"] == pytest.approx(mean, rel=1e-6)
    assert flops["model_flops_per_step"] != costs[-1].model
    assert flops["recomputed_flops_per_step"] == pytest.approx(recomputed, rel=FLOPS_TOLERANCE)
    assert sum(tower["forward"] + tower["backward"] for tower in towers) == pytest.approx(mean, rel=1e-6)
    assert flops["reason"] is None


def test_utilisation_is_the_median_of_what_each_step_reached_with_its_own_flops(robots: DataSpec, tmp_path: Path) -> None:
    cell = cell_of(robots)
    result, costs = measured(cell, tmp_path), costs_by_step(cell)
    steps = costs[MEASURE.warmup_steps : MEASURE.warmup_steps + MEASURE.steps]
    per_flop = [time / cost.model for time, cost in zip(result["step_time_s"], steps, strict=True)]
    assert result["mfu"] == pytest.approx(1 / median(per_flop) / PEAK, rel=1e-6)
    assert result["hfu"] > result["mfu"]


def test_without_a_formula_they_are_unknown_and_the_reason_is_given(
    robots: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "copy_meta_policy", lambda *_: None)
    result = measured(cell_of(robots), tmp_path)
    assert result["flops"]["model_flops_per_step"] is result["flops"]["recomputed_flops_per_step"] is result["mfu"] is None
    assert result["flops"]["reason"] == result["mfu_reason"]
    assert "the policy declares no formula" in result["mfu_reason"]


def test_a_cell_with_full_padding_has_the_flops_of_the_probed_step(robots: DataSpec, tmp_path: Path) -> None:
    cell = replace(cell_of(robots), padding="full")
    result, costs = measured(cell, tmp_path), costs_by_step(cell)
    assert {cost.model for cost in costs} == {result["flops"]["model_flops_per_step"]}


def sizes_of_measured_steps(cell: Cell) -> dict[str, list[int]]:
    """Return the cameras and prompt tokens of every micro-batch of the measured steps, from the stream itself."""
    first = ACCUMULATION * MEASURE.warmup_steps
    with closing(open_cell_data(cell, build_cell_policy(cell), 0)) as stream:
        batches = list(islice(stream, first, first + ACCUMULATION * MEASURE.steps))
    return {
        "cameras": [batch["images"].shape[2] for batch in batches],
        "prompt": [batch["prompt_mask"].shape[1] for batch in batches],
    }


def test_memory_is_predicted_for_the_sizes_of_the_step_in_which_it_is_measured(robots: DataSpec, tmp_path: Path) -> None:
    """With this seed the first step has fewer cameras."""
    cell = cell_of(robots, accumulation=1, batch=8)
    peak = measured(cell, tmp_path)["memory"]["allocated_peak_bytes"]
    first, probed = (Estimator().estimate(cell, step) for step in (0, MEASURE.probed_step))
    assert first.peak_bytes < 0.8 * peak
    assert probed.peak_bytes == pytest.approx(peak, rel=0.001)
    assert probed.has_size_of_step


@pytest.mark.parametrize("padding", ["full", "longest"])
def test_the_sizes_of_their_micro_batches_are_observed_beside_those_of_the_spec(
    padding: str, robots: DataSpec, tmp_path: Path
) -> None:
    cell = replace(cell_of(robots), padding=padding)
    spec = build_cell_policy(cell).batch_spec()
    observed = measured(cell, tmp_path)["observed"]
    assert observed["micro_batch_sizes_reason"] is None
    assert observed["micro_batch_sizes"].keys() == spec.part_sizes.keys()
    for part, sizes in sizes_of_measured_steps(cell).items():
        expected = {"smallest": min(sizes), "largest": max(sizes), "spec": spec.part_sizes[part]}
        assert observed["micro_batch_sizes"][part] == expected
        assert (expected["smallest"] < expected["spec"]) == (padding == "longest")


def test_a_cell_with_full_padding_whose_micro_batches_were_cut_is_a_mismatch_and_the_result_shows_it(
    robots: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = replace(cell_of(robots), padding="full")
    monkeypatch.setattr(
        measuring, "open_cell_data", lambda cell, *arguments: open_cell_data(replace(cell, padding="longest"), *arguments)
    )
    with pytest.raises(MismatchError, match="requested padding full, observed micro-batches that were cut: cameras 1"):
        measured(cell, tmp_path)
    result = read_json(tmp_path / "rank0.json")
    assert result["observed"]["micro_batch_sizes"]["cameras"]["smallest"] == 1


def test_sizes_are_unknown_for_a_policy_that_generates_its_batches(tmp_path: Path) -> None:
    cell = cell_of(DataSpec(kind="synthetic", workers=0), policy="hf:qwen3", attention="native", padding="full")
    observed = measured(cell, tmp_path)["observed"]
    assert observed["micro_batch_sizes"] is None
    assert observed["micro_batch_sizes_reason"] == "the policy generates its batches, and no spec says how large they are"
