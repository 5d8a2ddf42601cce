from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchbox.plan import launches, plan
from benchbox.registry.backends import backends
from benchbox.spec.cell import Cell, MeasureSpec
from benchbox.spec.matrix import Axis, BatchSearch, Matrix


def matrix(*axes: Axis, include=(), **scalars) -> Matrix:
    base = {"policy": "alpha", "size": "tiny", "backend": "ddp", "world_size": 2, "batch": 1}
    return Matrix(name="trial", path=Path("trial.yaml"), scalars=base | scalars, axes=axes, include=include)


def axis(name: str, *values) -> Axis:
    return Axis(name=name, points=tuple({name: value} for value in values))


def test_cells_come_in_the_order_of_the_file_every_time():
    planned = plan(matrix(axis("backend", "zero2", "ddp"), axis("batch", 2, 1)))
    assert [(cell.backend, cell.batch) for cell in planned.cells] == [("zero2", 2), ("zero2", 1), ("ddp", 2), ("ddp", 1)]
    assert planned == plan(matrix(axis("backend", "zero2", "ddp"), axis("batch", 2, 1)))


def test_what_a_backend_cannot_do_is_skipped_with_its_reason():
    planned = plan(matrix(axis("backend", "single", "ddp", "hsdp", "zero3"), checkpointing=True))
    assert [cell.backend for cell in planned.cells] == ["ddp"]
    reasons = {skip.cell.backend: skip.reason for skip in planned.skipped}
    assert reasons["single"] == "single runs on at most 1 rank, and world_size is 2"
    assert reasons["hsdp"] == "hsdp needs at least 4 ranks, and world_size is 2"
    assert reasons["zero3"].startswith("zero3 refuses activation checkpointing: ")


def test_hsdp_needs_ranks_in_pairs():
    planned = plan(matrix(axis("world_size", 4, 5, 6), backend="hsdp"))
    assert [cell.world_size for cell in planned.cells] == [4, 6]
    assert [skip.reason for skip in planned.skipped] == ["hsdp needs a multiple of 2 ranks, and world_size is 5"]


def test_what_compensates_rounding_is_skipped_where_deepspeed_steps_its_own_tensors():
    planned = plan(
        matrix(axis("backend", "ddp", "zero2", "fsdp2"), axis("recipe", "bf16_kahan", "bf16_stochastic", "bf16_naive"))
    )
    assert [(skip.cell.backend, skip.cell.recipe) for skip in planned.skipped] == [
        ("zero2", "bf16_kahan"),
        ("zero2", "bf16_stochastic"),
    ]
    assert planned.skipped[0].reason == (
        "zero2 has no bf16_kahan recipe: DeepSpeed steps flat tensors of its own in place of the bfloat16 parameters"
    )


@pytest.mark.parametrize(("recipe", "module"), [("bf16_stochastic", "torchao"), ("bf16_kahan", "optimi")])
def test_a_recipe_whose_library_is_not_installed_is_skipped_with_the_way_to_get_it(monkeypatch, recipe, module):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    planned = plan(matrix(axis("recipe", "bf16_master", recipe)))
    assert [cell.recipe for cell in planned.cells] == ["bf16_master"]
    assert [skip.reason for skip in planned.skipped] == [
        f"recipe {recipe} needs the module {module}, which is not installed: pip install 'benchbox[lowbit]'"
    ]


def test_flex_attention_is_skipped_where_every_batch_has_a_length_of_its_own():
    planned = plan(matrix(axis("padding", "full", "longest"), axis("attention", "sdpa", "flex")))
    assert [(cell.padding, cell.attention) for cell in planned.cells] == [
        ("full", "sdpa"),
        ("full", "flex"),
        ("longest", "sdpa"),
    ]
    assert [skip.reason for skip in planned.skipped] == [
        "FlexAttention is compiled for every length of a batch, unseen: write padding: full, or attention: sdpa"
    ]


def test_every_backend_can_run_something():
    for name, info in backends().items():
        cells = plan(matrix(backend=name, world_size=max(info.min_ranks, 1))).cells
        assert [cell.backend for cell in cells] == [name]


@pytest.mark.parametrize("backend", ["hsdp", "fsdp1_hybrid", "fsdp1_hybrid_grad_op"])
def test_a_hybrid_backend_needs_two_whole_groups_of_the_chosen_size(backend):
    planned = plan(matrix(axis("world_size", 4, 6, 8), axis("shard_size", 3, 4), backend=backend))
    assert [(cell.world_size, cell.shard_size) for cell in planned.cells] == [(6, 3), (8, 4)]
    assert [skip.reason.removeprefix(f"{backend} needs ") for skip in planned.skipped] == [
        "at least 6 ranks, and world_size is 4",
        "at least 8 ranks, and world_size is 4",
        "at least 8 ranks, and world_size is 6",
        "a multiple of 3 ranks, and world_size is 8",
    ]


def test_a_backend_that_shards_over_all_ranks_has_no_shard_size():
    (skip,) = plan(matrix(backend="fsdp2", shard_size=2)).skipped
    assert skip.reason == "fsdp2 has no shard_size: it is for fsdp1_hybrid, fsdp1_hybrid_grad_op, hsdp"


def test_a_cell_that_comes_twice_runs_once():
    planned = plan(matrix(axis("batch", 1, 2, 1), include=({"batch": 2},)))
    assert [cell.batch for cell in planned.cells] == [1, 2]
    assert [(skip.cell.batch, skip.reason) for skip in planned.skipped] == [
        (1, "the matrix has this cell already"),
        (2, "the matrix has this cell already"),
    ]


def test_launches_are_interleaved_so_that_drift_falls_on_every_cell():
    planned = plan(matrix(axis("batch", 1, 2, 4)))
    order = [(cell.batch, number) for cell, number in launches(planned, MeasureSpec(launches=3))]
    assert order == [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (1, 2), (1, 3), (2, 3), (4, 3)]


def test_only_narrows_cells_and_skips_alike():
    planned = plan(matrix(axis("backend", "single", "ddp", "zero1")), only="backend in [single, ddp]")
    assert [cell.backend for cell in planned.cells] == ["ddp"]
    assert [skip.cell.backend for skip in planned.skipped] == ["single"]
    assert all(isinstance(cell, Cell) for cell in planned.cells)


def test_an_included_batch_of_a_set_up_whose_batches_are_searched_is_skipped():
    point = {"backend": "ddp", "batch": 7}
    beside = matrix(axis("backend", "ddp", "zero2"), axis("batch", 2), include=(point, point | {"seed": 1}))
    planned = plan(replace(beside, search=BatchSearch(start=2)))
    assert [(cell.backend, cell.batch, cell.seed) for cell in planned.cells] == [("ddp", 2, 0), ("zero2", 2, 0), ("ddp", 7, 1)]
    assert [cell.backend for cell in planned.walks] == ["ddp", "zero2"]
    assert [(skip.cell.batch, skip.reason) for skip in planned.skipped] == [
        (7, "the search along the axis batch chooses the batches of this set-up")
    ]
    assert [(cell.seed, number) for cell, number in launches(planned, MeasureSpec(launches=1))] == [(1, 1)]
