"""The measurement of one cell, and the matrix that the plugin of pytest makes of a marker."""

from __future__ import annotations

import pytest

import benchbox
from benchbox.api.measurement import Measurement
from benchbox.api.pytest_plugin import _matrix, _why_not_ok
from benchbox.errors import ConfigurationError
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MIB, example_record, example_run

FINDING = {"title": "t", "where": "w", "rank": 0, "cause": None, "repair": "r", "evidence": {}, "locations": []}


@pytest.fixture
def measurement(tmp_path):
    """A cell of two launches with the same findings."""
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    for launch in (1, 2):
        record = example_record(launch=launch)
        severities = {"BXP2": "unknown", "BXP1": "error", "BXP3": "warning", "BXP4": "info"}
        record["precision"]["findings"] = [FINDING | {"code": code, "severity": name} for code, name in severities.items()]
        store.write_record(record)
    return Measurement(benchbox.load(tmp_path))


def test_figures_are_those_of_the_only_cell(measurement):
    cells = measurement.results.cells
    assert measurement.samples_per_s == cells["global_samples_per_s"].item() > 0
    assert measurement.step_time_s == cells["step_time_s"].item()
    assert measurement.peak_allocated_bytes == 160 * MIB
    assert measurement.value("mfu") is None
    with pytest.raises(ConfigurationError, match="unknown metric 'speed'"):
        measurement.value("speed")
    with pytest.raises(ConfigurationError, match="metric 'status' is a word"):
        measurement.value("status")


def test_findings_that_fail_an_audit_are_listed_once(measurement):
    assert measurement.failing == ["BXP1 t: r", "BXP2 t: r"]


def test_a_marker_is_a_matrix_of_one_cell_whose_folders_are_below_the_root_of_the_tests(tmp_path):
    for name in ("mine", "data"):
        (tmp_path / name).mkdir()
    marker = {"policy": "mine", "data": "data", "recipe": "fp32", "measure": {"steps": 2}}
    assert _matrix(marker, tmp_path) == {
        "name": "test",
        "size": "tiny",
        "world_size": 1,
        "policy": str(tmp_path / "mine"),
        "data": {"lerobot": str(tmp_path / "data")},
        "recipe": "fp32",
        "axes": {"backend": ["single"]},
        "measure": {"launches": 1, "steps": 2},
    }
    for name in ("pi05", "sample"):
        (tmp_path / name).mkdir()
    assert _matrix({"policy": "pi05", "data": "sample"}, tmp_path).items() >= {"policy": "pi05", "data": "sample"}.items()
    ranks = _matrix({"policy": "pi05", "backend": "ddp", "data": {"kind": "sample"}, "measure": {"launches": 5}}, tmp_path)
    assert (ranks["policy"], ranks["data"], ranks["world_size"]) == ("pi05", {"kind": "sample"}, 2)
    assert (ranks["axes"], ranks["measure"]) == ({"backend": ["ddp"]}, {"launches": 5})
    assert _matrix({"policy": "pi05", "backend": "zero2", "world_size": 4}, tmp_path)["world_size"] == 4
    section = {"mixture": [{"lerobot": "data", "weight": 1}, {"lerobot": "elsewhere", "weight": 2}], "workers": 0}
    below = [{"lerobot": str(tmp_path / "data"), "weight": 1}, {"lerobot": "elsewhere", "weight": 2}]
    assert _matrix({"policy": "pi05", "data": section}, tmp_path)["data"] == {"mixture": below, "workers": 0}


def test_launches_that_train_unlike_one_another_are_named(tmp_path):
    """No launch has an error then."""
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    for launch in (1, 2):
        record = example_record(launch=launch)
        store.write_record(record | {"loss": [launch * value for value in record["loss"]]})
    assert "the cell is diverged: its loss differs by" in _why_not_ok(benchbox.load(tmp_path))
