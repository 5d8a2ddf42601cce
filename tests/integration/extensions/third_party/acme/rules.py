"""Rules of a third party."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.audit.rules.base import Rule, RuleViolation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.observer.facts import RankFacts


def _without_second_moment(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        tensors = [tensor for tensor in rank_facts.stepped if "exp_avg_sq" not in tensor.state]
        if tensors:
            yield RuleViolation("warning", tensors[0].optimizer, rank_facts.rank, {"tensors": len(tensors)})
            return


RULES = (
    Rule(
        code="ACME101",
        title="steps are not scaled by a second moment",
        severity="warning",
        rationale="the learning rates of this team are tuned for Adam",
        measurement="the optimizer state of every stepped tensor",
        repair="use a recipe whose optimizer is an Adam",
        references=(),
        sections=("stepped",),
        check=_without_second_moment,
    ),
)
