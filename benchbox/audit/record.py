"""The precision audit of a launch: the ranks' files of facts, and what its launch record keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from benchbox.audit.judge import judge
from benchbox.observer.facts import RankFacts
from benchbox.observer.stepped_tensors import all_stepped_tensors, edq
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchbox.registry.launch_record import CensusRecord, FindingRecord, Precision


def facts_file(rank: int) -> str:
    """Return the name of the file that a rank writes its facts to."""
    return f"facts-rank{rank}.json"


def read_facts(folder: Path, ranks: int) -> list[RankFacts]:
    """Read the facts that the ranks of a launch wrote into its folder.

    Raises:
        RecordError: the file of a rank is missing or damaged.
    """
    return [RankFacts.from_dict(read_json(folder / facts_file(rank))) for rank in range(ranks)]


def build_precision_record(facts: Sequence[RankFacts]) -> Precision:
    """Build the section `precision` of a launch record from the facts of all its ranks."""
    judgement = judge(facts)
    return {
        "census": [cast("CensusRecord", entry.to_dict()) for rank_facts in facts for entry in rank_facts.entries],
        "findings": [cast("FindingRecord", finding.to_dict()) for finding in judgement.findings],
        "not_judged": dict(judgement.not_judged),
        "numbers": summarize_numbers(facts),
        "problems": observer_problems(facts),
    }


def observer_problems(facts: Iterable[RankFacts]) -> list[str]:
    """Return a line about everything that an observer failed at, on any rank."""
    return [f"rank {rank_facts.rank}: {problem}" for rank_facts in facts for problem in rank_facts.problems]


def summarize_numbers(facts: Sequence[RankFacts]) -> dict[str, float | None]:
    """Return the effect of the observed steps on all stepped tensors of all ranks; None where nothing was measured.

    `edq` is the effective descent quality, <u, applied change> / |u|^2 for the computed updates u; `updates_lost` the share of
    non-zero updates that left the stored weight unchanged; `second_moment_stalled` the share of 16-bit second moments that
    rounding keeps from decaying.
    """
    tensors = [tensor for _, tensor in all_stepped_tensors(facts)]
    updates = sum(tensor.numbers.updates for tensor in tensors)
    lost = sum(tensor.numbers.updates_lost for tensor in tensors)
    stalled = [
        (tensor.elements, tensor.numbers.second_moment_stalled)
        for tensor in tensors
        if tensor.numbers.second_moment_stalled is not None
    ]
    elements = sum(size for size, _ in stalled)
    return {
        "edq": edq(tensor.numbers for tensor in tensors),
        "updates_lost": lost / updates if updates else None,
        "second_moment_stalled": sum(size * share for size, share in stalled) / elements if elements else None,
    }
