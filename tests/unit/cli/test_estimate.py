"""`benchbox estimate` and `plan --estimate`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.errors import ConfigurationError

MATRIX = """
name: small
policy: vitra
size: tiny
data: synthetic
world_size: 2
batch: 1
axes: {backend: [ddp, fsdp2]}
"""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    path = tmp_path_factory.mktemp("matrix") / "small.yaml"
    path.write_text(MATRIX)
    return str(path)


def invoke(*arguments):
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_cell_has_its_components_and_the_bounds_of_its_time(matrix):
    cells = json.loads(invoke("estimate", matrix, "--format", "json", "--accelerator", "h200", "--link", "nvlink4"))
    assert [entry["cell"]["backend"] for entry in cells] == ["ddp", "fsdp2"]
    for entry in cells:
        prediction, time_s = entry["prediction"], entry["step_time_s"]
        assert sum(prediction["components"].values()) == prediction["peak_bytes"]
        assert 0 < time_s["lower"] <= time_s["upper"]
    text = invoke("estimate", matrix, "--only", "backend=ddp")
    assert "peak" in text
    assert "all_reduce" in text


def test_a_plan_shows_predictions_when_asked(matrix):
    assert "predicted peak" in invoke("plan", matrix, "--estimate")
    assert "predicted peak" not in invoke("plan", matrix)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--link", "nvlink4"), "needs --accelerator and --link"),
        (("--link", "nvlink5", "--accelerator", "h100"), "unknown name 'nvlink5'"),
    ],
)
def test_a_time_without_known_hardware_is_refused_in_a_line(matrix, options, message):
    with pytest.raises(ConfigurationError, match=message):
        CliRunner().invoke(app, ("estimate", matrix, *options), catch_exceptions=False)
