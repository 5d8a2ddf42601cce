"""ZeRO-3 on a policy whose steps use other modules as their samples have it, beside the prediction for each step."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.estimation import Estimator
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import MeasureSpec
from tests.support.ranks import CellRun, run_cells, tiny_cell

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.spec.cell import Cell

pytestmark = pytest.mark.ranks

LAUNCHES = 3
Collectives = dict[str, dict[str, int]]

# With and without accumulation and a frozen tower: the number of steps of which the last is counted.
SHAPES: dict[str, dict[str, Any]] = {
    "whole": {},
    "split": {"batch": 1, "accumulation": 2},
    "frozen": {"freeze": "freeze_vision"},
}
COUNTED = [("whole", 2), ("whole", 3), ("split", 3), ("frozen", 3)]
ALSO_COUNTED = [("whole", 4), ("whole", 5), ("split", 4), ("frozen", 4)]  # the same turns of the coordinator again


def varying_cell(shape: str) -> Cell:
    """Return a cell of whose steps some have a subgoal on one rank and others on none."""
    return tiny_cell(policy="pi07_paligemma", backend="zero3", **SHAPES[shape])


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[tuple[str, int], Collectives]:
    """Return the collectives of the last of some steps."""
    keys = [*COUNTED, *(ALSO_COUNTED if exhaustive else ())]
    runs = [CellRun(varying_cell(shape), steps, "collectives") for shape, steps in keys]
    results = run_cells(runs, tmp_path_factory.mktemp("zero3"))
    return {key: result["collectives"] for key, result in zip(keys, results, strict=True)}


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator()


@pytest.mark.parametrize(
    ("shape", "steps"), [*COUNTED, *(pytest.param(*key, marks=pytest.mark.exhaustive) for key in ALSO_COUNTED)]
)
def test_every_step_is_predicted_to_the_byte_whatever_order_the_steps_before_it_left(
    counted: dict[tuple[str, int], Collectives], estimator: Estimator, shape: str, steps: int
) -> None:
    """Steps that record an order, that follow it and that leave it half-way: their all-gathers differ by a factor of 2.6."""
    assert estimator.estimate(varying_cell(shape), steps - 1).collectives == counted[shape, steps]


def test_a_record_has_the_step_that_is_predicted_for_its_run(tmp_path: Path, estimator: Estimator) -> None:
    """With its memory: what is whole at the peak, and the activations of the parts that the samples of this step have.

    gloo's thread may hold the buffers of a collective until it has run once more, so the least of some peaks counts.
    """
    cell, measure = varying_cell("whole"), MeasureSpec(warmup_steps=2, steps=1, launches=1)
    prediction = estimator.estimate(cell, measure.probed_step)
    launcher, peaks = ForkServerLauncher(), []
    with closing(launcher):
        while not peaks or (len(peaks) < LAUNCHES and min(peaks) != pytest.approx(prediction.peak_bytes, rel=0.005)):
            record = launch_cell(cell, measure, launch=1, folder=tmp_path / str(len(peaks)), launcher=launcher)
            assert record["status"] == "ok", record["error"]
            assert record["collectives"] == prediction.collectives
            peaks.append(record["memory"]["worst"]["allocated_peak_bytes"])
    assert min(peaks) == pytest.approx(prediction.peak_bytes, rel=0.005)


def test_the_steps_that_are_counted_record_an_order_and_leave_it(counted: dict[tuple[str, int], Collectives]) -> None:
    """Before a step that records one there are two broadcasts, and six once it is recorded."""
    assert [counted["whole", steps]["broadcast"]["count"] for steps in (2, 3)] == [6, 2]
    bytes_gathered = [counted["whole", steps]["all_gather"]["bytes"] for steps in (2, 3)]
    assert bytes_gathered[0] != bytes_gathered[1]
