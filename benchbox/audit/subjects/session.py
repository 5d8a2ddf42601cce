"""A session as a subject of the audit: a few observed steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from benchbox.audit.subjects.contract import recipe_contract
from benchbox.measure.phases import NONE, Instrument
from benchbox.measure.probe import StepProbe
from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    from benchbox.observer.facts import RankFacts
    from benchbox.registry.recipes import Recipe
    from benchbox.session import Session

STEPS = 3  # the minimum that shows a pinned weight


def observe_session(
    session: Session, micro_batches: Any, recipe: Recipe, probe: StepProbe | None = None, instruments: Instrument = NONE
) -> RankFacts:
    """Take three steps under an observer and return the facts of this rank.

    The observer samples tensors before and after the first and the last step. The middle one runs under `probe`.
    """
    probe = probe or StepProbe(session.model, (), session.device)
    prepared = session.backend.prepared
    with StepObserver(
        source="session",
        steps=STEPS,
        model=prepared.model,
        optimizer=prepared.optimizer,
        schedules=[prepared.schedule],
        contract=recipe_contract(recipe),
        operations=probe.operations,
    ) as observer:
        for step in range(STEPS):
            is_middle = step == STEPS // 2
            with probe if is_middle else nullcontext():
                result = session.step(probe.record(micro_batches) if is_middle else micro_batches, instruments)
            observer.record_norm(result.grad_norm, session.backend.max_grad_norm)
    return observer.facts()
