"""Audits of sessions of the trainer, in one process."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from benchbox.audit.judge import judge
from benchbox.audit.subjects.session import observe_session
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from torch import Tensor


class SecondIsSpike:
    """Spikes whose second norm is one."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def skips(self, norm: Tensor) -> bool:
        self.norms.append(norm)
        return len(self.norms) == 2


def test_a_step_that_is_skipped_as_a_spike_is_no_fault_of_the_schedule() -> None:
    """It advances in that step, in which no optimizer steps, as in every other."""
    cell = tiny_cell(policy="pi0", backend="single", world_size=1, recipe="fp32")
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, 0)) as batches:
        session = build_session(cell, policy, batches.statistics)
        session.spikes = spikes = SecondIsSpike()
        facts = observe_session(session, batches, recipe_by_name(cell.recipe))
    assert len(spikes.norms) == 3
    assert [set(step.schedule_steps.values()) for step in facts.steps] == [{1}, {2}]
    assert "BXP403" not in {finding.code for finding in judge([facts]).findings}
