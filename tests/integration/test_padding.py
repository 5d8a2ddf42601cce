"""A step of ranks whose micro-batches have different shapes equals the step with all padding."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.session.build import build_cell_policy, open_cell_data
from tests.support.datasets import write_unequal_robots
from tests.support.ranks import CellRun, run_cells, tiny_cell

if TYPE_CHECKING:
    from benchbox.spec.cell import Cell, DataSpec

pytestmark = pytest.mark.ranks

POLICIES, BACKENDS, PADDINGS = ("pi05", "pi07_low_level"), ("ddp", "fsdp2"), ("full", "longest")
MICRO_BATCHES = 4  # of both steps
Key = tuple[str, str, str]


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return write_unequal_robots(tmp_path_factory.mktemp("robots"))


def cell_of(robots: DataSpec, policy: str, backend: str, padding: str) -> Cell:
    shape: dict[str, Any] = {"batch": 1, "accumulation": 2, "cams": 3, "seed": 1}
    return tiny_cell(policy=policy, backend=backend, padding=padding, data=robots, recipe="fp32", **shape)


@pytest.fixture(scope="module")
def results(robots: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[Key, dict[str, Any]]:
    """Results of two steps of every cell, in one process group."""
    folder = tmp_path_factory.mktemp("cells")
    keys = list(product(POLICIES, BACKENDS, PADDINGS))
    runs = [CellRun(cell_of(robots, *key), 2) for key in keys]
    results = dict(zip(keys, run_cells(runs, folder), strict=True))
    for result in results.values():
        result["gradient"] = torch.load(folder / f"{result['index']}.pt", weights_only=True)
    return results


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_have_micro_batches_of_different_shapes(robots: DataSpec, policy: str) -> None:
    """Otherwise the others would show nothing."""
    cell = cell_of(robots, policy, "ddp", "longest")
    shapes = []
    for rank in range(cell.world_size):
        with closing(open_cell_data(cell, build_cell_policy(cell), rank)) as stream:
            batches = [next(stream) for _ in range(MICRO_BATCHES)]
        shapes.append([(batch["images"].shape[2], batch["prompt_mask"].shape[1]) for batch in batches])
    first, second = shapes
    assert any(left != right for left, right in zip(first, second, strict=True))
    whole = build_cell_policy(replace(cell, padding="full")).batch_spec()
    assert all(cameras < whole.cameras for cameras, _ in (*first, *second))


@pytest.mark.parametrize(("policy", "backend"), product(POLICIES, BACKENDS))
def test_losses_and_gradients_are_those_of_the_step_with_all_padding(
    results: dict[Key, dict[str, Any]], policy: str, backend: str
) -> None:
    full, longest = (results[policy, backend, padding] for padding in PADDINGS)
    assert longest["observed"]["backend"] == backend
    assert longest["loss"] == pytest.approx(full["loss"], rel=1e-5)
    assert longest["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-4)
    assert longest["gradient"].keys() == full["gradient"].keys()
    assert len(longest["gradient"]) > 20
    for name, expected in full["gradient"].items():
        torch.testing.assert_close(longest["gradient"][name], expected, rtol=1e-4, atol=1e-5, msg=name)
