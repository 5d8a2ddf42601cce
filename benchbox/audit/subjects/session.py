"""A session as a subject of the audit: a few observed steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from benchbox.audit.subjects.contract import recipe_contract
from benchbox.measure.phases import NONE, Instrument
from benchbox.measure.probe import StepProbe
from benchbox.observer.observer import StepObserver
from benchbox.registry.phases import PROBED_STEPS

if TYPE_CHECKING:
    from benchbox.observer.facts import RankFacts
    from benchbox.registry.recipes import Recipe
    from benchbox.session import Session, StepResult

STEPS = PROBED_STEPS


class SessionObservation:
    """Observation of the next three steps of a session. The observer is installed from the creation on.

    The observer samples tensors before and after the first and the last step. The middle one runs under `probe`.
    """

    def __init__(self, session: Session, recipe: Recipe, probe: StepProbe | None = None) -> None:
        self._session = session
        self._probe = probe or StepProbe(session.model, (), session.device)
        self._steps = self._skipped = 0
        prepared = session.backend.prepared
        self._observer = StepObserver(
            source="session",
            steps=STEPS,
            model=prepared.model,
            optimizer=prepared.optimizer,
            schedules=[prepared.schedule],
            contract=recipe_contract(recipe),
            operations=self._probe.operations,
        )
        self._observer.install()

    def step(self, micro_batches: Any, instruments: Instrument = NONE) -> StepResult:
        """Take a step of the session."""
        is_middle = self._steps == STEPS // 2
        self._steps += 1
        with self._probe if is_middle else nullcontext():
            batches = self._probe.record(micro_batches) if is_middle else micro_batches
            result = self._session.step(batches, instruments)
        if result.skipped:
            self._skipped += 1
            self._observer.record_skip()
        else:
            self._observer.record_norm(result.grad_norm, self._session.backend.max_grad_norm)
        return result

    @property
    def is_skipped(self) -> bool:
        """True if the guard against spikes skipped all steps, on every rank alike: nothing was seen that could be judged."""
        return self._steps == self._skipped

    def facts(self) -> RankFacts:
        """Remove the observer and return the facts of this rank."""
        self._observer.remove()
        return self._observer.facts()

    def close(self) -> None:
        """Remove the observer, also in the middle of the steps."""
        self._observer.remove()


def observe_session(
    session: Session, micro_batches: Any, recipe: Recipe, probe: StepProbe | None = None, instruments: Instrument = NONE
) -> RankFacts:
    """Take three steps under an observer and return the facts of this rank. See `SessionObservation`."""
    observation = SessionObservation(session, recipe, probe)
    try:
        for _ in range(STEPS):
            observation.step(micro_batches, instruments)
    finally:
        observation.close()
    return observation.facts()
