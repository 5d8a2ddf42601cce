"""From the facts that the ranks of a launch leave to what its record keeps of the audit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.audit.judge import judge
from benchbox.observer.facts import RankFacts, all_stepped, edq
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def facts_file(rank: int) -> str:
    """The name under which a rank writes its facts."""
    return f"facts-rank{rank}.json"


def read_facts(folder: Path, ranks: int) -> list[RankFacts]:
    """The facts that the ranks of a launch left in its folder.

    Raises:
        RecordError: a rank left none.
    """
    return [RankFacts.from_dict(read_json(folder / facts_file(rank))) for rank in range(ranks)]


def build_precision_record(facts: Sequence[RankFacts]) -> dict[str, Any]:
    """`precision` of a launch record, from the facts of all its ranks."""
    judgement = judge(facts)
    return {
        "census": [entry.to_dict() for rank in facts for entry in rank.entries],
        "findings": [finding.to_dict() for finding in judgement.findings],
        "not_judged": dict(judgement.not_judged),
        "numbers": summarize_numbers(facts),
        "problems": [f"rank {each.rank}: {problem}" for each in facts for problem in each.problems],
    }


def summarize_numbers(facts: Sequence[RankFacts]) -> dict[str, float | None]:
    """What the steps that were looked at did to all tensors stepped on all ranks; None where nothing of the kind was seen.

    `edq` is the effective descent quality, <u, what arrived> / |u|^2; `updates_lost` the share of non-zero updates that left
    the stored weight as it was; `second_moment_stalled` the share of 16-bit second moments that decay rounds back to.
    """
    numbers = [(tensor.elements, tensor.numbers) for _, tensor in all_stepped(facts)]
    updates = sum(each.updates for _, each in numbers)
    stalled = [(size, each.second_moment_stalled) for size, each in numbers if each.second_moment_stalled is not None]
    held = sum(size for size, _ in stalled)
    return {
        "edq": edq(each for _, each in numbers),
        "updates_lost": sum(each.updates_lost for _, each in numbers) / updates if updates else None,
        "second_moment_stalled": sum(size * share for size, share in stalled) / held if held else None,
    }
