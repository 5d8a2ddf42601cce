"""Simulated ranks, which run the code of a backend, hold and communicate what the formulas say, to the byte."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.errors import UnsupportedError
from benchbox.estimation.estimate import estimate
from benchbox.estimation.simulation import Simulation, simulate
from benchbox.launch.process.environment import host_variables
from benchbox.registry.backends import BUILT_IN_BACKENDS
from tests.support.ranks import tiny_cell
from tests.support.tiers import in_tiers

# FSDP2's fake tensors and DeepSpeed's partitions take a minute of CPU time at 1024 ranks: they loop over all of them.
CELLS = [
    (name, ranks)
    for name, info in BUILT_IN_BACKENDS.items()
    for ranks in (4 if info.hybrid else 2, 8, 64, 1024)
    if name != "single"
]
DEFAULT = {("fsdp2", 8)}

MATRIX = """\
name: large
policy: pi05
size: tiny
recipe: bf16_master
data: synthetic
world_size: 1024
batch: 2
axes: {backend: [ddp]}
include: [{backend: zero2, world_size: 8}, {backend: single, world_size: 1}]
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


@pytest.mark.parametrize(("backend", "ranks"), in_tiers(CELLS, DEFAULT.__contains__))
def test_a_simulated_rank_equals_the_formulas(backend: str, ranks: int) -> None:
    cell = replace(tiny_cell(backend=backend), world_size=ranks)
    simulation = simulate(cell, environment={**os.environ, **host_variables(os.environ)})
    assert simulation.differences(estimate(cell)) == []
    assert simulation.tensors == ("fake" if backend in ("fsdp2", "hsdp") else "real")


def test_the_command_compares_rank_0_of_1024_with_the_formulas_and_says_what_is_not_simulated(
    folder: Path, cache: Path
) -> None:
    result = CliRunner().invoke(app, ["estimate", str(folder / "large.yaml"), "--simulate"], catch_exceptions=False)
    for ranks in (1024, 8):
        assert f"simulated as rank 0 of {ranks} on real tensors: equals the formulas in every collective" in result.output
    assert not (cache / "torch_extensions").exists()
    assert "not simulated: backend single is not simulated: there is no formula" in result.output


def test_another_number_of_bytes_is_named() -> None:
    predicted = estimate(tiny_cell(backend="ddp"))
    size = predicted.components["parameters"]
    equal = Simulation(collectives=predicted.collectives, parameter_bytes=size, tensors="real")
    assert equal.differences(predicted) == []
    differences = replace(equal, parameter_bytes=size + 4, collectives={}).differences(predicted)
    assert any(text.startswith("all_reduce is None, the formula says") for text in differences)
    assert differences[-1] == f"parameters take {size + 4} bytes, the formula says {size}"


def test_a_policy_that_cannot_be_simulated_is_one_line() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be simulated: \S+"):
        simulate(tiny_cell(backend="fsdp2", policy="no_such_policy"))


@pytest.mark.usefixtures("cache")
def test_json_has_the_simulation(folder: Path) -> None:
    arguments = ["estimate", str(folder / "large.yaml"), "--simulate", "--only", "backend=single", "--format", "json"]
    (row,) = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).output)
    assert row["simulation"] == {"reason": "backend single is not simulated: there is no formula to compare with"}
