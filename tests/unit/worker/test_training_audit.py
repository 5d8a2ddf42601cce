"""The audit inside a training: what ends the training."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ThresholdError
from benchbox.measure.phases import NONE
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.audit_section import AuditSection
from benchbox.spec.cell import Cell, DataSpec
from benchbox.spec.optim import SpikeSpec
from benchbox.worker.training_audit import TrainingAudit
from tests.support.facts import ranks

if TYPE_CHECKING:
    from pathlib import Path


CELL = Cell(
    policy="value",
    size="tiny",
    backend="single",
    world_size=1,
    batch=1,
    recipe="fp32",
    data=DataSpec(kind="synthetic", workers=0),
)


def audit_three_steps(cell: Cell, section: AuditSection, path: Path) -> TrainingAudit:
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank=0)) as stream:
        session = build_session(cell, policy, stream.statistics)
        audit = TrainingAudit(session, recipe_by_name(cell.recipe), section, path, start=0, group=None)
        for step in range(3):
            audit.take_step(step, stream, NONE)
    assert audit.is_due(3)
    return audit


def test_steps_that_the_guard_has_all_skipped_are_not_judged_and_end_no_training(tmp_path: Path) -> None:
    """No optimizer was seen to step, which of other steps would be a finding."""
    cell = replace(CELL, optim=replace(CELL.optim, spike=SpikeSpec(action="skip", max=1e-30)))
    path = tmp_path / "findings.jsonl"
    audit_three_steps(cell, AuditSection(every=3, stop_on="warning"), path).judge(3)
    (row,) = map(json.loads, path.read_text().splitlines())
    assert (row["step"], row["skipped"], row["findings"]) == (3, True, [])


def test_an_observer_that_failed_in_skipped_steps_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchbox.observer.numerics.probes.TensorProbe.before_step", lambda *_: 1 / 0)
    monkeypatch.setattr("benchbox.audit.subjects.session.SessionObservation.is_skipped", True)
    audit = audit_three_steps(CELL, AuditSection(every=3), tmp_path / "findings.jsonl")
    with pytest.raises(ThresholdError, match="the observer failed on rank 0"):
        audit.judge(3)


@pytest.mark.parametrize("stop_on", ["error", "never"])
def test_an_observer_that_failed_ends_a_training_that_errors_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_on: str
) -> None:
    """Rules that could not be judged may hide an error."""
    monkeypatch.setattr("benchbox.observer.numerics.probes.TensorProbe.before_step", lambda *_: 1 / 0)
    section, path = AuditSection(every=3, stop_on=stop_on), tmp_path / "findings.jsonl"
    audit = audit_three_steps(CELL, section, path)
    if stop_on == "never":
        audit.judge(3)
    else:
        with pytest.raises(ThresholdError, match=r"the observer failed on rank 0: .*ZeroDivisionError"):
            audit.judge(3)
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["problems"][0].startswith("rank 0: ")


@pytest.mark.parametrize(("stop_on", "codes"), [("error", []), ("warning", ["BXP603"]), ("never", [])])
def test_a_warning_ends_a_training_that_warnings_end_and_no_other(tmp_path: Path, stop_on: str, codes: list[str]) -> None:
    section = AuditSection(every=3, stop_on=stop_on)
    recipe, path = recipe_by_name("fp32"), tmp_path / "findings.jsonl"
    audit = TrainingAudit(None, recipe, section, path, start=0, group=None)  # type: ignore[arg-type]
    assert audit._log(ranks(default_dtype="bfloat16"), 3, skipped=False) == codes


def test_audits_that_are_repeated_after_an_interruption_are_logged_once_and_one_that_saw_no_steps_is_not_due(
    tmp_path: Path,
) -> None:
    path = tmp_path / "findings.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (3, 6, 9)))
    recipe = recipe_by_name("fp32")
    audit = TrainingAudit(None, recipe, AuditSection(every=3), path, start=6, group=None)  # type: ignore[arg-type]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3, 6]
    assert not audit.is_due(9), "resumed between the steps that it observes"
