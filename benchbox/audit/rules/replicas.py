"""BXP407: copies of one weight on several ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from benchbox.audit.rules.base import Rule, RuleViolation, names_evidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.observer.facts import RankFacts, SteppedTensor, UpdateStatistics

# Collectives of ranks that hold different parts of a model: of pipelines and of experts.
_OF_PARTS = frozenset({"send", "recv", "all_to_all"})


class _Replicas(NamedTuple):
    """One stepped tensor on every rank, with the same values before the first observed step."""

    tensor: SteppedTensor
    numbers: list[UpdateStatistics]  # by rank

    @property
    def drifts(self) -> bool:
        return len({numbers.digest_after for numbers in self.numbers}) > 1

    @property
    def moved_alike(self) -> bool:
        return not self.drifts and self.numbers[0].digest_after != self.numbers[0].digest_before


def _drifting_replicas(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    if _collectives_of_parts(facts) is not None:
        return
    replicas = list(_replicas(facts))
    drifting = [entry for entry in replicas if entry.drifts]
    if not drifting:
        return
    alike = sum(entry.moved_alike for entry in replicas)
    groups: defaultdict[str | None, list[int]] = defaultdict(list)
    for rank_facts, numbers in zip(facts, drifting[0].numbers, strict=True):
        groups[numbers.digest_after].append(rank_facts.rank)
    evidence = {
        "tensors that drift apart": len(drifting),
        "tensors that stay equal": alike,
        "ranks that agree": [" ".join(map(str, members)) for members in groups.values()],
        **names_evidence(entry.tensor.name for entry in drifting),
    }
    is_wrapped = any(rank_facts.setup is not None and rank_facts.setup.backend == "ddp" for rank_facts in facts)
    yield RuleViolation("error" if alike or is_wrapped else "warning", drifting[0].tensor.optimizer, facts[0].rank, evidence)


def _replicas(facts: Sequence[RankFacts]) -> Iterator[_Replicas]:
    """Yield the tensors that all ranks of the training began with alike. A shard has other values on each rank."""
    if len(facts) < 2 or len(facts) < facts[0].world_size:
        return
    by_name: defaultdict[tuple[str, tuple[int, ...]], list[SteppedTensor]] = defaultdict(list)
    for rank_facts in facts:
        for tensor in rank_facts.stepped:
            by_name[tensor.name, tensor.shape].append(tensor)
    for tensors in by_name.values():
        numbers = [tensor.numbers for tensor in tensors]
        beginnings = {(statistics.steps, statistics.digest_before) for statistics in numbers}
        is_known = all(statistics.digest_before and statistics.digest_after for statistics in numbers)
        if len(tensors) == len(facts) and is_known and len(beginnings) == 1:
            yield _Replicas(tensors[0], numbers)


def _collectives_of_parts(facts: Sequence[RankFacts]) -> str | None:
    names = sorted({use.operation for rank_facts in facts for use in rank_facts.collectives} & _OF_PARTS)
    return f"ranks may hold different parts of a model: {', '.join(names)} was seen" if names else None


RULES = (
    Rule(
        code="BXP407",
        title="replicas of the weights drift apart: ranks train a model each",
        severity="error",
        conditions="error; warning where no tensor stays equal and DDP wraps none, as in local SGD",
        rationale=(
            "data parallelism trains one model: modules that are not wrapped or called around their wrapper, steps under "
            "no_sync, and rounding by other random numbers on each rank train as many as there are ranks, and one is saved"
        ),
        measurement=(
            "a digest of a sample of every stepped tensor on every rank, before the first observed step and after the last "
            "probed one; of tensors that all ranks begin with alike, unless all their elements are equal"
        ),
        repair=(
            "wrap all modules that train (accelerate: give them to prepare), call the wrapper and not its module, leave "
            "no_sync before the last micro-batch of a step, and draw random numbers of the optimizer alike on all ranks"
        ),
        locations=("optimizer",),
        references=("OpenTSLM#49",),
        sections=("stepped", "numbers"),
        check=_drifting_replicas,
        missing_evidence=_collectives_of_parts,
    ),
)
