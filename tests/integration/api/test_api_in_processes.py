"""The Python interface where processes matter: a measurement, and an audit by several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchbox
from benchbox.errors import ConfigurationError
from tests.support.ranks import RANK_SCRIPTS, run_ranks

pytestmark = pytest.mark.ranks

MATRIX = """\
name: api
policy: pi05
size: tiny
backend: single
world_size: 1
data: synthetic
recipe: fp32
measure: {warmup_steps: 1, steps: 2, launches: 1}
axes: {batch: [1, 2]}
"""


def test_a_matrix_is_measured_and_a_repeated_call_reuses_its_launches(tmp_path, capsys):
    matrix = tmp_path / "api.yaml"
    matrix.write_text(MATRIX)
    results = benchbox.run(matrix, out=tmp_path / "run", overrides={"axes.batch": [1]}, only=["batch=1"])
    assert results.cells["status"].tolist() == ["ok"]
    assert results.cells["batch"].tolist() == [1]
    assert results.cells["global_samples_per_s"].item() > 0
    assert "report: " in capsys.readouterr().out, "what the command prints is shown"
    started = results.launches["started_at"].item()
    again = benchbox.run(matrix, out=tmp_path / "run", overrides={"axes.batch": [1]})
    assert again.launches["started_at"].item() == started


def test_a_matrix_of_a_policy_in_another_folder_is_found_without_a_run_directory(tmp_path, policy_dir, monkeypatch):
    (tmp_path / "api.yaml").write_text(MATRIX.replace("pi05", "stand_in"))
    others = policy_dir.rename(tmp_path / "others")  # `policies` would be found by itself
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="unknown policy 'stand_in'"):
        benchbox.run("api.yaml")
    results = benchbox.run("api.yaml", policy_dirs=[others], only=["batch=1"])
    assert results.path == Path("runs/api")
    assert "crash" in results.cells["status"].tolist(), "it was launched: it is no more than a name"


def test_every_rank_gets_the_judgement_on_all_of_them(tmp_path):
    run_ranks(2, RANK_SCRIPTS / "live_audit.py", str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["ranks"] == second["ranks"] == 2
    assert first["errors"] == second["errors"]
    assert ["BXP101", 1] in first["errors"]
