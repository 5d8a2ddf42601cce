"""`compile` as an axis: what it compiles is observed, and trains as the same cell without it.

Compiling takes a minute: cells of one process share their layers and their batch, so that all but the first find its graphs in
the cache of torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.analysis.invariants import OBSERVED_INVARIANTS
from benchbox.errors import MismatchError
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.registry.backends import backends
from benchbox.registry.refusals import cell_refusal
from benchbox.spec.cell import Cell, DataSpec, MeasureSpec
from benchbox.store.run import RunStore
from benchbox.worker.expected import check_compilation
from tests.support.commands import run_in_process
from tests.support.ranks import CellRun, run_cells, tiny_cell
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchbox.registry.launch_record import LaunchRecord

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reports" / "compile"
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
    """Return a cell with the data and the batch that one process has in `matrices/compile.yaml`."""
    return tiny_cell(
        backend=backend, world_size=RANKS.get(backend, 2), batch=4, recipe="fp32", data=DataSpec(workers=0), **changes
    )


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
        # Hooks of a backend may run uncompiled, and no layer does, unless they are inside of what is compiled.
        if mode == "blocks" or backend in ("single", "ddp", "zero1", "zero2"):
            assert not [entry for entry in rank["uncompiled"] if "policies/" in entry["function"]]
    assert plain["compilation"] is None
    assert compiled["collectives"] == plain["collectives"]
    assert compiled["flops"] == plain["flops"]
    assert {entry["code"] for entry in compiled["precision"]["findings"]} == {
        entry["code"] for entry in plain["precision"]["findings"]
    }
    (invariant,) = [rule for rule in OBSERVED_INVARIANTS if rule.sentence == "compilation is as requested"]
    assert list(invariant.check(compiled)) == []


@pytest.mark.parametrize("mode", in_tiers(("blocks", "model"), "blocks".__eq__))
def test_a_compiled_policy_has_the_gradient_of_the_same_one_without_it(tmp_path: Path, mode: str) -> None:
    """The gradient of every trainable parameter, in float32 at the first step of one process."""
    runs = [CellRun(cell_of("single", compile=value), 1) for value in ("off", mode)]
    results = run_cells(runs, tmp_path)
    gradients, expected = (torch.load(tmp_path / f"{index}.pt", weights_only=True) for index in (1, 0))
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], rel=TOLERANCE)
    assert gradients.keys() == expected.keys()
    assert len(gradients) > 20
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.exhaustive  # by default a profile of the cell finds them
@pytest.mark.parametrize("backend", DEFAULT)
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


def test_a_profile_of_a_compiled_cell_knows_no_bytes_that_are_fused_and_no_towers_of_mixed_layers(
    launch: Any, tmp_path: Path
) -> None:
    """Its products stay operations: all FLOPs of the same cell without compilation are counted."""
    launch(cell_of("single", compile="blocks"))
    matrix, changes = ROOT / "matrices" / "compile.yaml", ("recipe=fp32", "measure={warmup_steps: 2, steps: 3, launches: 1}")
    selected = ("--only", "backend=single, compile=blocks", *(f"--set={change}" for change in changes))
    done = run_in_process("profile", matrix, *selected, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    (rank,) = profile["ranks"]
    assert rank["compilation"]["graphs"] > 0
    assert rank["compilation"]["from_cache"] > rank["compilation"]["not_from_cache"] == 0, "the launch has compiled them"
    assert profile["compilation_doubts"] == []
    rows = {row["phase"]: row for row in profile["phases"]}
    for phase in ("forward", "backward"):
        assert rows[phase]["bytes"] is rows[phase]["bytes_per_s"] is rows[phase]["of_memory"] is None
        assert f"{phase}: {rows[phase]['bytes_reason']}\n" in done.stdout
        towers = {row["tower"]: row["flops"] for row in profile["towers"] if row["phase"] == phase}
        assert min(towers[name] for name in ("unknown", "vision", "head")) > 0
        assert towers["unknown"] > 0.9 * sum(towers.values())
        assert towers["none"] <= 0.1 * sum(towers.values())
    assert "unknown: torch.compile has made one function of several towers\n" in done.stdout
    assert rows["optimizer"]["bytes"] > 0
    plain = Cell.from_dict(profile["cell"] | {"compile": "off", "recipe": "bf16_master"})
    assert plain.cell_id in {record["cell_id"] for record in RunStore(PUBLISHED).records()}
    (flops,) = {record["flops"]["model_flops_per_step"] for record in RunStore(PUBLISHED).records()}  # type: ignore[index]
    assert sum(product["flops"] for product in rank["products"]) == flops + profile["recomputed_flops"]


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
