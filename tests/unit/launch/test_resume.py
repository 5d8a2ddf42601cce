"""Selection of the launches that are still to be run."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchbox.launch import resume
from benchbox.registry.policies import policy_entry
from benchbox.store.run import RunStore
from tests.support.launchers import MEASURE, cell


def test_a_plan_of_many_cells_reads_the_sources_of_each_policy_once(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of cells waited minutes for their first launch when every cell read them."""
    policies = []
    original = resume.policy_sha256
    monkeypatch.setattr(resume, "policy_sha256", lambda name, folders: policies.append(name) or original(name, folders))
    launches = [(replace(cell("healthy"), seed=seed), 1) for seed in range(20)]
    pending = resume.pending_launches(launches, MEASURE, RunStore(tmp_path / "run"), [policy_dir], fresh=False)
    assert pending.launches == launches
    assert policies == ["stand_in"]


def test_of_other_policies_not_even_the_presets_are_read(policy_dir: Path) -> None:
    broken = policy_dir / "another"
    broken.mkdir()
    (broken / "policy.py").touch()
    (broken / "presets.yaml").write_text("tiny: [")
    assert policy_entry("stand_in", [policy_dir]).presets == {"tiny": {}}
