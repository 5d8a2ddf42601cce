"""A model and an optimizer of this process as a subject of the audit, in any training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from benchbox.audit.judge import Judgement, judge, observer_failures
from benchbox.audit.record import summarize_numbers
from benchbox.audit.subjects.contract import recipe_contract
from benchbox.audit.subjects.session import STEPS
from benchbox.errors import ThresholdError
from benchbox.observer.facts import RankFacts
from benchbox.observer.observer import StepObserver
from benchbox.registry.recipes import recipe_by_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from benchbox.audit.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionAudit:
    """Judgement on the facts of all ranks. `numbers` are `edq`, `updates_lost` and `second_moment_stalled`."""

    judgement: Judgement
    facts: tuple[RankFacts, ...]
    numbers: dict[str, float | None]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.judgement.findings

    @property
    def passed(self) -> bool:
        """Return whether no finding is an error or unknown, and no observer failed: what it missed is unknown too."""
        return not self.judgement.failing() and not observer_failures(self.facts)

    def check(self) -> None:
        """Raise ThresholdError, with every failing finding and its repair, unless the audit passed."""
        failing = set(self.judgement.failing())
        lines = [f"{finding.code} {finding.title}: {finding.repair}" for finding in self.findings if finding.code in failing]
        lines += observer_failures(self.facts)
        if lines:
            raise ThresholdError("\n".join(lines))


def observe(model: nn.Module | None = None, optimizer: Optimizer | Any = None, *, steps: int = STEPS) -> StepObserver:
    """Return an observer of the next optimizer steps: a context manager whose `facts()` say what they did.

        with benchbox.observe(model, optimizer) as observer:
            train()
        facts = observer.facts()

    Objects that are not passed are searched for in the process at the first step. The observer only reads.

    Args:
        steps: optimizer steps to watch, after which the observer removes itself; three at least show a weight that never moves.
    """
    return StepObserver(source="command", steps=steps, model=model, optimizer=optimizer)


def audit_precision(
    model: nn.Module, optimizer: Optimizer | Any, step: Callable[[], object], *, recipe: str | None = None, steps: int = STEPS
) -> PrecisionAudit:
    """Audit the precision of a training: call `step` a few times under an observer and judge what it saw.

        result = benchbox.audit_precision(model, optimizer, lambda: train_step(next(batches)))
        result.check()

    The steps really train. In a process group every rank must call this; each gets the judgement on all of them.

    Args:
        step: takes one optimizer step, as the training does: forward, backward, clipping, `optimizer.step()`, `zero_grad()`.
        recipe: name of the precision that is intended; a deviation is then a finding.
        steps: number of calls.

    Raises:
        ConfigurationError: there is no such recipe.
    """
    contract = recipe_contract(recipe_by_name(recipe)) if recipe else None
    with StepObserver(source="command", steps=steps, model=model, optimizer=optimizer, contract=contract) as observer:
        for _ in range(steps):
            step()
    facts = _gather(observer.facts())
    return PrecisionAudit(judgement=judge(facts), facts=tuple(facts), numbers=summarize_numbers(facts))


def _gather(facts: RankFacts) -> list[RankFacts]:
    """Return the facts of all ranks, on every rank."""
    if not dist.is_initialized():
        return [facts]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, facts.to_dict())
    return [RankFacts.from_dict(values) for values in gathered]
