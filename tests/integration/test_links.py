"""Links between two real ranks: measured, kept for this machine, and used by estimates under their own name."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.cli.links import read_measured_link
from benchbox.launch.links import measure_links
from benchbox.launch.peaks import measure_peaks
from benchbox.launch.process import make_launcher
from benchbox.measure.environment import environment
from benchbox.measure.links import COLLECTIVES
from benchbox.store.links import read_links
from tests.support.predictions import predicting_in_this_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MATRIX = """\
name: links
policy: pi05
size: tiny
recipe: fp32
data: synthetic
world_size: 2
batch: 1
axes: {backend: [ddp, fsdp2]}
"""

pytestmark = pytest.mark.ranks


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the links of this machine, measured at a few sizes, a matrix, and the texts that the commands printed.

    `unmeasured.txt` is an estimate from before the links were measured.
    """
    cache = tmp_path_factory.mktemp("cache")
    (cache / "matrix.yaml").write_text(MATRIX)
    with pytest.MonkeyPatch.context() as patch, predicting_in_this_process():
        patch.setenv("XDG_CACHE_HOME", str(cache))
        (cache / "unmeasured.txt").write_text(invoke("estimate", cache / "matrix.yaml", "--only", "backend=ddp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchbox.launch.links.SIZES", (2**10, 2**16, 2**24))
        # Not in the environment of the ranks, who would need a fork server of their own.
        patch.setattr("benchbox.store.machine_cache.os", SimpleNamespace(environ={"XDG_CACHE_HOME": str(cache)}))
        (cache / "output.txt").write_text(invoke("doctor", "--links"))
    return cache


@pytest.fixture
def cache(measured: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured))
    return measured


@pytest.mark.parametrize("measure", [measure_links, measure_peaks])
def test_what_is_stopped_measures_nothing_and_is_no_failure(measure: Callable[..., object]) -> None:
    """Ctrl-C, after which `doctor` ends with 130."""
    assert measure(make_launcher("local"), 2, stop=lambda: True) is None


@pytest.mark.parametrize("option", ["--links", "--peaks"])
def test_a_doctor_that_was_stopped_while_it_measured_ends_with_130(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"benchbox.launch.{option[2:]}.measure_{option[2:]}", lambda *_, **__: None)
    assert CliRunner().invoke(app, ["doctor", option]).exit_code == 130


def test_every_collective_is_timed_between_two_ranks_at_every_size(cache: Path) -> None:
    links = read_links(environment()["machine"])["gloo"]
    assert links.ranks == 2
    assert tuple(links.collectives) == COLLECTIVES
    for times in links.collectives.values():
        assert times["bytes"] == [2**10, 2**16, 2**24]
        assert times["seconds"][2] > max(times["seconds"][:2])  # 16 MiB against 64 KiB
        assert times["bytes_per_s"] > 0
        assert 0 <= times["median_error"] <= times["max_error"]


def test_the_command_prints_a_line_for_each_collective_and_the_file(cache: Path) -> None:
    output = (cache / "output.txt").read_text()
    assert [line.split()[0] for line in output.splitlines()[2:6]] == list(COLLECTIVES)
    assert str(cache) in output


def test_an_estimate_names_the_measured_link_and_its_time(cache: Path) -> None:
    matrix = cache / "matrix.yaml"
    text = invoke("estimate", matrix, "--only", "backend=ddp")
    assert "communication on the measured link: " in text
    assert "measured: gloo between 2 ranks of this machine" in text
    (cell,) = json.loads(invoke("estimate", matrix, "--format", "json", "--only", "backend=ddp"))
    fits = read_links(environment()["machine"])["gloo"].collectives
    traffic = cell["prediction"]["collectives"]
    expected = sum(
        entry["count"] * fits[name]["latency_s"] + entry["bytes"] / fits[name]["bytes_per_s"] for name, entry in traffic.items()
    )
    assert traffic.keys() <= fits.keys()
    assert cell["communication_time_s"] == {"link": "measured", "upper": pytest.approx(expected)}


@pytest.mark.usefixtures("cache")
def test_a_link_of_the_cpu_is_not_that_of_gpus() -> None:
    links = {device: read_measured_link(device) for device in ("cpu", "cuda")}
    assert links["cpu"] is not None
    assert links["cuda"] is None


def test_a_link_that_was_not_measured_is_refused_with_the_command_that_measures_it(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["estimate", str(measured / "matrix.yaml"), "--link", "measured"])
    assert "benchbox doctor --links" in str(result.exception)
    unmeasured = (measured / "unmeasured.txt").read_text()
    assert "communication of a step: all_reduce" in unmeasured
    assert "measured" not in unmeasured
