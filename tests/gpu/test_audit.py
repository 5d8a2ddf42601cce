"""The auditor on a session of the device."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.subjects.session import observe_session
from benchbox.registry.recipes import recipe_by_name
from benchbox.session.build import build_cell_policy, build_session, open_cell_data
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    import torch

    from benchbox.audit.judge import Judgement
    from benchbox.observer.facts import RankFacts


def audit(recipe: str) -> tuple[RankFacts, Judgement]:
    cell = tiny_cell(backend="single", world_size=1, recipe=recipe)
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank=0)) as stream:
        session = build_session(cell, policy, stream.statistics)
        facts = observe_session(session, stream, recipe_by_name(recipe))
    return facts, judge([facts])


@pytest.mark.parametrize("recipe", ["bf16_master", "fp32_autocast"])
def test_a_clean_session_has_no_findings(device: torch.device, recipe: str) -> None:
    facts, judgement = audit(recipe)
    assert facts.problems == (), "the observer failed"
    assert [finding.code for finding in judgement.findings] == []
    assert facts.stepped
    assert {tensor.device.split(":")[0] for tensor in facts.stepped} == {device.type}


def test_pure_bfloat16_has_findings(device: torch.device) -> None:
    """A silent auditor would pass the test above."""
    _, judgement = audit("bf16_pure")
    assert "BXP101" in [finding.code for finding in judgement.findings]
