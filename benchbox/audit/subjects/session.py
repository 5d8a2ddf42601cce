"""A session as a subject of the audit: a few observed steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.audit.subjects.contract import recipe_contract
from benchbox.measure.phases import NONE, Instrument
from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    from benchbox.observer.facts import RankFacts
    from benchbox.registry.recipes import Recipe
    from benchbox.session import Session

STEPS = 6  # the first, middle and last are probed: the minimum that shows a pinned weight


def observe_session(session: Session, micro_batches: Any, recipe: Recipe, instruments: Instrument = NONE) -> RankFacts:
    """Take some steps under an observer and return the facts of this rank."""
    prepared = session.backend.prepared
    with StepObserver(
        source="session",
        steps=STEPS,
        model=prepared.model,
        optimizer=prepared.optimizer,
        schedules=[prepared.schedule],
        contract=recipe_contract(recipe),
    ) as observer:
        for _ in range(STEPS):
            result = session.step(micro_batches, instruments)
            observer.record_norm(result.grad_norm, session.backend.max_grad_norm)
    return observer.facts()
