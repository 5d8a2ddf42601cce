"""Audit of a training while it runs: every so many steps the observer watches a few, and the rules judge all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from benchbox.audit.judge import Judgement, judge
from benchbox.audit.record import observer_problems, summarize_numbers
from benchbox.audit.subjects.session import STEPS, SessionObservation
from benchbox.errors import ThresholdError
from benchbox.observer.facts import RankFacts
from benchbox.store.files import json_text, keep_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from benchbox.measure.phases import Instrument
    from benchbox.registry.contracts import Batch
    from benchbox.registry.recipes import Recipe
    from benchbox.session import Session, StepResult
    from benchbox.spec.audit_section import AuditSection


class TrainingAudit:
    """Audits the three steps up to every multiple of `section.every`. See `benchbox.trainer.loop.StepAudit`.

    Args:
        path: rank 0 appends one row for each audit. Rows of steps after `start`, which are repeated, are removed.
        start: first step of this run.
        group: gathers the facts of all ranks, see `cpu_group`.
    """

    def __init__(
        self,
        session: Session,
        recipe: Recipe,
        section: AuditSection,
        path: Path,
        *,
        start: int,
        group: ProcessGroup | None,
    ) -> None:
        self._session = session
        self._recipe = recipe
        self._section = section
        self._path = path
        self._group = group
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._observation: SessionObservation | None = None
        if self._rank == 0 and path.exists():
            keep_rows(path, lambda step: step <= start)

    def take_step(self, step: int, batches: Iterator[Batch], instruments: Instrument) -> StepResult:
        """Take a step of the session, under the observer if it is one of the last three before an audit."""
        if step % self._section.every == self._section.every - STEPS:
            self._observation = SessionObservation(self._session, self._recipe)
        if self._observation is None:  # also in a training that was resumed between these steps
            return self._session.step(batches, instruments)
        return self._observation.step(batches, instruments)

    def is_due(self, completed: int) -> bool:
        """Return whether the steps before an audit were observed."""
        return self._observation is not None and completed % self._section.every == 0

    def judge(self, completed: int) -> None:
        """Judge the facts of all ranks and log the findings.

        Raises:
            ThresholdError: there is a finding of the severity that stops the training.
        """
        assert self._observation is not None, "the audit is due"
        observation, self._observation = self._observation, None
        gathered = self._gather(observation.facts().to_dict())
        failing: list[list[str]] = [[]]
        if gathered is not None:
            facts = [RankFacts.from_dict(rank_facts) for rank_facts in gathered]
            failing = [self._log(facts, completed, skipped=observation.is_skipped)]
        if dist.is_initialized():
            dist.broadcast_object_list(failing, src=0, group=self._group)
        if failing[0]:
            codes = ", ".join(failing[0])
            raise ThresholdError(f"the audit after step {completed} ends the training: {codes}; see {self._path}")

    def close(self) -> None:
        """Remove the observer of steps whose audit will not come, because the training ends."""
        if self._observation is not None:
            self._observation.close()

    def _gather(self, facts: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the facts of all ranks on rank 0, None on the others."""
        if not dist.is_initialized():
            return [facts]
        gathered: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(facts, gathered, dst=0, group=self._group)
        return gathered

    def _log(self, facts: list[RankFacts], completed: int, *, skipped: bool) -> list[str]:
        """Write the row of an audit and return what stops the training: codes of findings, and failures of the observer."""
        judgement = Judgement(findings=()) if skipped else judge(facts)
        problems = observer_problems(facts)
        row = {
            "step": completed,
            "findings": [finding.to_dict() for finding in judgement.findings],
            "not_judged": dict(judgement.not_judged),
            "numbers": {} if skipped else summarize_numbers(facts),
            "problems": problems,
            **({"skipped": True} if skipped else {}),
        }
        with self._path.open("a") as log:
            log.write(json_text(row) + "\n")
        if self._section.stop_on == "never":
            return []
        failing = judgement.failing(warnings=self._section.stop_on == "warning")
        return [*failing, *(f"the observer failed on {problem}" for problem in problems)]
