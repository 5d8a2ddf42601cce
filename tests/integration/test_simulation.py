"""Simulated ranks, which run the code of a backend, hold and communicate what the formulas say, to the byte."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.errors import UnsupportedError
from benchbox.estimation.estimate import estimate
from benchbox.launch.process.environment import host_variables
from benchbox.launch.simulated_ranks import Simulation, simulate_cells
from benchbox.registry.backends import BUILT_IN_BACKENDS
from benchbox.theory.sharding import MODELS
from tests.support.predictions import predicting_in_this_process
from tests.support.ranks import tiny_cell
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.spec.cell import Cell

# FSDP2's fake tensors and DeepSpeed's partitions take a minute of CPU time at 1024 ranks: they loop over all of them.
CELLS = [
    (name, ranks)
    for name, info in BUILT_IN_BACKENDS.items()
    for ranks in (4 if info.hybrid else 2, 8, 64, 1024)
    if name != "single"
]
DEFAULT = {("fsdp2", 8)}
MOST_SHARED = 64  # ranks of a cell that is simulated with others; those of a minute have the time limit of a test each

BROKEN = {"broken": "raise KeyError('no weights')", "fatal": "import os; os._exit(9)"}
BROKEN_CELLS = [tiny_cell(backend="fsdp2", policy=name) for name in ("no_such_policy", *BROKEN)]
FROZEN_CELL = tiny_cell(backend="fsdp1_full", freeze="train_expert_only", checkpointing=True, attention="eager")
GROUPED_CELLS = [tiny_cell(backend=backend, world_size=8, shard_size=4) for backend in ("hsdp", "fsdp1_hybrid")]

MATRIX = """\
name: large
policy: pi05
size: tiny
recipe: bf16_master
data: synthetic
world_size: 1024
batch: 2
optim: {spike: {}}
axes: {backend: [ddp]}
include:
  - {backend: zero2, world_size: 8}
  - {backend: zero3, world_size: 2, policy: pi07_paligemma}
  - {backend: single, world_size: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the matrix, and with a cache that has the extension which the ranks of launches have compiled: in the cache
    that environments share, it would be anew."""
    folder = tmp_path_factory.mktemp("simulation")
    (folder / "large.yaml").write_text(MATRIX)
    (folder / "cache" / "benchbox").mkdir(parents=True)
    extensions = Path(host_variables(os.environ)["TORCH_EXTENSIONS_DIR"]).parent
    (folder / "cache" / "benchbox" / "torch_extensions").symlink_to(extensions)
    return folder


@pytest.fixture
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache of a test, in which a cell is predicted once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder / "cache"


def rank_environment() -> dict[str, str]:
    return {**os.environ, **host_variables(os.environ)}


def sized_cell(backend: str, ranks: int) -> Cell:
    return replace(tiny_cell(backend=backend), world_size=ranks)


@pytest.fixture(scope="module")
def simulations(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Simulations of three cells that cannot be simulated, and after them, of those cells of this module's tests that run and
    take seconds. One process imports torch for all of them."""
    selected = [
        item.callspec.params
        for item in request.session.items
        if item.fspath == request.node.fspath
        if hasattr(item, "callspec")
    ]
    cells = [
        sized_cell(**params) for params in selected if params.keys() == {"backend", "ranks"} and params["ranks"] <= MOST_SHARED
    ]
    policies = tmp_path_factory.mktemp("policies")
    for name, body in BROKEN.items():
        (policies / name).mkdir()
        (policies / name / "presets.yaml").write_text("tiny: {}\n")
        (policies / name / "policy.py").write_text(f"def build(preset, axes):\n    {body}\n")
    cells = [*BROKEN_CELLS, FROZEN_CELL, *GROUPED_CELLS, *cells]
    return simulate_cells(cells, [policies], environment=rank_environment())


def simulate(cell: Cell) -> Simulation:
    simulation = simulate_cells([cell], environment=rank_environment())[cell.cell_id]
    assert isinstance(simulation, Simulation), simulation
    return simulation


@pytest.mark.parametrize(("backend", "ranks"), in_tiers(CELLS, DEFAULT.__contains__))
def test_a_simulated_rank_equals_the_formulas(backend: str, ranks: int, simulations: Mapping[str, Any]) -> None:
    cell = sized_cell(backend, ranks)
    simulation = simulations[cell.cell_id] if ranks <= MOST_SHARED else simulate(cell)
    assert isinstance(simulation, Simulation), simulation
    assert simulation.differences(estimate(cell)) == []
    assert simulation.tensors == ("fake" if backend in ("fsdp2", "hsdp") else "real")


def test_the_command_compares_rank_0_of_1024_with_the_formulas_and_says_what_is_not_simulated(
    folder: Path, cache: Path
) -> None:
    """A simulation repeats one step, so that under ZeRO-3 the prediction is of one after others like it.

    With a spike guard, for which DeepSpeed's norms are computed before its step as well.
    """
    with predicting_in_this_process():
        result = CliRunner().invoke(app, ["estimate", str(folder / "large.yaml"), "--simulate"], catch_exceptions=False)
    for ranks in (1024, 8, 2):
        assert f"simulated as rank 0 of {ranks} on real tensors: equals the formulas in every collective" in result.output
    assert not (cache / "torch_extensions").exists()
    assert "not simulated: backend single is not simulated: it has no collectives" in result.output


def test_frozen_units_within_checkpointed_layers_are_gathered_as_often_as_the_formula_says(
    simulations: Mapping[str, Any],
) -> None:
    """FSDP1 shards frozen modules of a layer, and an embedding that is called for each part of the sequence, by themselves."""
    assert simulations[FROZEN_CELL.cell_id].differences(estimate(FROZEN_CELL)) == []


def test_another_number_of_bytes_is_named() -> None:
    predicted = estimate(tiny_cell(backend="ddp"))
    size = predicted.components["parameters"]
    equal = Simulation(collectives=predicted.collectives, parameter_bytes=size, tensors="real")
    assert equal.differences(predicted) == []
    differences = replace(equal, parameter_bytes=size + 4, collectives={}).differences(predicted)
    assert any(text.startswith("all_reduce is None, the formula says") for text in differences)
    assert differences[-1] == f"parameters take {size + 4} bytes, the formula says {size}"


def test_a_policy_that_cannot_be_simulated_is_one_line(simulations: Mapping[str, Any]) -> None:
    """Also one whose code ends its process. The cells after it are simulated."""
    reasons = [simulations[cell.cell_id] for cell in BROKEN_CELLS]
    assert all(isinstance(reason, UnsupportedError) and "\n" not in str(reason) for reason in reasons)
    assert [str(reason).partition(" cannot be simulated: ")[2] for reason in reasons[1:]] == [
        "KeyError: 'no weights'",
        "exit code 9",
    ]
    assert re.search(r"cannot be simulated: \S+", str(reasons[0]))


def test_the_end_of_the_process_that_forks_is_the_reason_of_every_cell(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)")
    simulations = simulate_cells(BROKEN_CELLS, environment={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert [*simulations] == [cell.cell_id for cell in BROKEN_CELLS]
    assert all(str(reason).endswith("cannot be simulated: exit code 3") for reason in simulations.values())


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ({"backend": "single"}, "backend single is not simulated: it has no collectives"),
        ({"backend": "fsdp2", "world_size": 2}, "backend fsdp2 is not simulated: there is no formula"),
        ({"backend": "ddp", "world_size": 2, "compile": "blocks"}, "compiled graphs are not simulated"),
    ],
)
def test_a_cell_that_is_not_simulated_has_the_reason(
    cell: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 stands for a backend of somebody's own."""
    monkeypatch.setattr("benchbox.launch.simulated_ranks.MODELS", {"ddp": MODELS["ddp"]})
    refused = tiny_cell(**cell)
    assert str(simulate_cells([refused], environment={})[refused.cell_id]).startswith(reason)


@pytest.mark.usefixtures("cache")
def test_json_has_the_simulation(folder: Path) -> None:
    arguments = ["estimate", str(folder / "large.yaml"), "--simulate", "--only", "backend=single", "--format", "json"]
    (row,) = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).output)
    assert row["simulation"] == {"reason": "backend single is not simulated: it has no collectives"}


def test_a_hybrid_shards_over_groups_of_the_size_that_its_cell_says(simulations: Mapping[str, Any]) -> None:
    """Two copies over four ranks each. On four ranks with the default size there are as many groups as copies."""
    for cell in GROUPED_CELLS:
        simulation = simulations[cell.cell_id]
        assert isinstance(simulation, Simulation), simulation
        assert simulation.differences(estimate(cell)) == []
