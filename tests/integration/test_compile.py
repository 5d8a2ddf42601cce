"""`compile` as an axis: what it compiles is observed, and trains as the same cell without it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.analysis.invariants import OBSERVED_INVARIANTS
from benchbox.errors import MismatchError
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.registry.backends import backends
from benchbox.registry.refusals import cell_refusal
from benchbox.spec.cell import MeasureSpec
from benchbox.worker.expected import check_compilation
from tests.support.ranks import tiny_cell
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.spec.cell import Cell

MEASURE = MeasureSpec(warmup_steps=2, steps=3, launches=1)
# Compiled code may add in another order: rounding of float32, after five steps.
TOLERANCE = 1e-4
RANKS = {"single": 1, "hsdp": 4, "fsdp1_hybrid": 4, "fsdp1_hybrid_grad_op": 4}
# The first compiles for the others, which find its graphs in the cache: two ranks would compile everything twice.
DEFAULT = ("single", "ddp")

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Cell], LaunchRecord]]:
    """Launch a cell, once. Its graphs are in torch's own cache if an earlier run of the tests has compiled the same code."""
    launcher = ForkServerLauncher()

    @cache
    def launch(cell: Cell) -> LaunchRecord:
        return launch_cell(cell, MEASURE, launch=1, folder=tmp_path_factory.mktemp("launch"), launcher=launcher)

    yield launch
    launcher.close()


def cell_of(backend: str, **changes: Any) -> Cell:
    return tiny_cell(backend=backend, world_size=RANKS.get(backend, 2), recipe="fp32", **changes)


def cases() -> list[Any]:
    values = [(name, mode) for name, info in backends().items() for mode in info.compile_modes if mode != "off"]
    marks = {True: [], False: [pytest.mark.exhaustive]}
    return [pytest.param(*value, marks=marks[value in [(name, "blocks") for name in DEFAULT]]) for value in values]


@pytest.mark.parametrize(("backend", "mode"), cases())
def test_a_compiled_policy_trains_as_the_same_one_without_it(launch: Any, backend: str, mode: Any) -> None:
    plain, compiled = launch(cell_of(backend)), launch(cell_of(backend, compile=mode))
    assert compiled["status"] == "ok", compiled["error"]
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE)
    assert compiled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=10 * TOLERANCE)
    for rank in compiled["compilation"]["per_rank"]:
        assert rank["graphs"] > 0
        assert rank["time_s"] > 0
        assert rank["in_measured_steps"] == 0, rank["recompilations"]
    assert plain["compilation"] is None
    assert compiled["collectives"] == plain["collectives"]
    assert compiled["flops"] == plain["flops"]
    assert {entry["code"] for entry in compiled["precision"]["findings"]} == {
        entry["code"] for entry in plain["precision"]["findings"]
    }
    (invariant,) = [rule for rule in OBSERVED_INVARIANTS if rule.sentence == "compilation is as requested"]
    assert list(invariant.check(compiled)) == []


@pytest.mark.parametrize("backend", in_tiers(DEFAULT, "single".__eq__))
def test_a_second_launch_finds_its_graphs_in_the_cache(launch: Any, backend: str) -> None:
    cell = cell_of(backend, compile="blocks")
    launch(cell)
    again = launch(replace(cell, seed=1))
    for rank in again["compilation"]["per_rank"]:
        assert rank["from_cache"] > 0
        assert rank["not_from_cache"] == 0


@pytest.mark.parametrize("backend", in_tiers(DEFAULT, "single".__eq__))
def test_a_layer_that_is_compiled_is_recomputed_as_one_that_is_not(launch: Any, backend: str) -> None:
    plain, compiled = (launch(cell_of(backend, checkpointing=True, compile=mode)) for mode in ("off", "blocks"))
    assert compiled["status"] == "ok", compiled["error"]
    assert compiled["observed"]["checkpointed_modules"] == plain["observed"]["checkpointed_modules"] > 0
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE)


def test_memory_that_compiled_code_takes_on_a_cpu_is_unknown_with_a_reason(launch: Any) -> None:
    record = launch(cell_of("ddp", compile="blocks"))
    assert record["memory"]["worst"] == {"rank": None, "allocated_peak_bytes": None, "reserved_peak_bytes": None}
    assert "compiled code allocates buffers" in record["memory"]["reason"]


def test_a_cell_that_compiled_nothing_is_a_mismatch() -> None:
    nothing: Any = {"graphs": 0}
    for compilation in (None, nothing):
        with pytest.raises(MismatchError, match="requested compile blocks, observed that nothing was compiled"):
            check_compilation(cell_of("ddp", compile="blocks"), compilation)


def test_a_policy_that_recomputes_inside_its_graph_is_refused() -> None:
    refusal = cell_refusal(cell_of("ddp", compile="model", checkpointing=True))
    assert refusal is not None
    assert "write compile: blocks" in refusal
