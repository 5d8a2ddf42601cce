"""The answer of a run: the fastest set-up that fits, whether launches settle that, and whether its precision is right.

Cells that do the same work per sample form a task: the same policy, size, cameras, data and ranks. In a task backend, batch,
attention, checkpointing and recipe are free. A set-up whose audit has an error is no answer, however fast it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Literal

from benchbox.analysis.comparability import verdict_of_effect, why_incomparable
from benchbox.analysis.inference import ONE_TEST, Criteria, estimate_effect, launches_to_settle
from benchbox.registry.metrics import metric_by_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from benchbox.analysis.inference import Effect
    from benchbox.analysis.summary import CellSummary

SETUP_FIELDS = ("backend", "shard_size", "batch", "accumulation", "attention", "checkpointing", "compile", "recipe")

PrecisionState = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A set-up that is not shown to be slower than the fastest. `effect` is the fastest's throughput as a multiple of its."""

    summary: CellSummary
    effect: Effect | None
    is_equal: bool = False  # launches show that no difference is relevant
    reason: str | None = None  # why they cannot be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer for one task. `fastest` is None when no set-up ended ok, fits and has the right precision."""

    task: Mapping[str, Any]  # the fields that all its cells share
    fastest: CellSummary | None
    rivals: tuple[Rival, ...]  # that launches do not show to be slower, the nearest first
    candidates: int  # set-ups among which the fastest was chosen
    too_large: int  # set-ups that ended ok and need more than the memory limit
    unknown_memory: int  # set-ups that ended ok and whose peak was not observed, if there is a limit
    wrong: tuple[CellSummary, ...]  # set-ups at least as fast whose precision is wrong, the fastest first
    more_launches: int | None  # of the fastest and its nearest rival, before any difference could settle them

    @property
    def is_settled(self) -> bool:
        return self.fastest is not None and all(rival.is_equal for rival in self.rivals)

    @property
    def precision(self) -> PrecisionState | None:
        return None if self.fastest is None else precision_state(self.fastest)


def answers(
    summaries: Sequence[CellSummary], *, memory_limit: int | None = None, criteria: Criteria = ONE_TEST
) -> list[Answer]:
    """Return the answer for every task of a run, in the order of its cells.

    Args:
        memory_limit: bytes of a rank; set-ups with a larger peak, or an unknown one, are no candidates.
        criteria: of the tests. All pairs of a task count, because the fastest is chosen by the launches that are tested.
    """
    tasks: dict[str, list[CellSummary]] = {}
    for summary in summaries:
        task = {field: value for field, value in summary.cell.items() if field not in SETUP_FIELDS}
        tasks.setdefault(json.dumps(task, sort_keys=True), []).append(summary)
    return [_answer(cells, memory_limit, criteria) for cells in tasks.values()]


def precision_state(summary: CellSummary) -> PrecisionState:
    """Return whether the audit of a cell has an error; unknown without an audit, or with a finding that was not judged."""
    if summary.precision is None:
        return "unknown"
    severities = {finding["severity"] for finding in summary.precision["findings"]}
    return "wrong" if "error" in severities else "unknown" if "unknown" in severities else "right"


def _answer(cells: Sequence[CellSummary], memory_limit: int | None, criteria: Criteria) -> Answer:
    task = {field: value for field, value in cells[0].cell.items() if field not in SETUP_FIELDS}
    measured = sorted((summary for summary in cells if summary.status == "ok" and _speed(summary)), key=_speed, reverse=True)
    with_peak = [summary for summary in measured if memory_limit is None or summary.peak_bytes is not None]
    fitting = [summary for summary in with_peak if memory_limit is None or (summary.peak_bytes or 0) <= memory_limit]
    candidates = [summary for summary in fitting if precision_state(summary) != "wrong"]
    fastest = candidates[0] if candidates else None
    pairs = comb(len(candidates), 2)
    judged = [] if fastest is None else [_rival(fastest, summary, pairs, criteria) for summary in candidates[1:]]
    rivals = tuple(rival for rival in judged if rival is not None)
    nearest = next((rival.summary for rival in rivals if not rival.is_equal), None)
    launches = min((len(summary.ok) for summary in (fastest, nearest) if summary is not None), default=0)
    missing = launches_to_settle(max(1, pairs), alpha=criteria.alpha) - launches
    return Answer(
        task=task,
        fastest=fastest,
        rivals=rivals,
        candidates=len(candidates),
        too_large=len(with_peak) - len(fitting),
        unknown_memory=len(measured) - len(with_peak),
        wrong=tuple(
            summary
            for summary in fitting
            if precision_state(summary) == "wrong" and (fastest is None or _speed(summary) >= _speed(fastest))
        ),
        more_launches=missing if missing > 0 and nearest is not None else None,
    )


def _speed(summary: CellSummary) -> float:
    spread = summary.values["global_samples_per_s"]
    return 0.0 if spread is None else spread.value


def _rival(fastest: CellSummary, other: CellSummary, pairs: int, criteria: Criteria) -> Rival | None:
    """Return the other set-up if launches do not show that it is slower."""
    if reason := why_incomparable(fastest, other, SETUP_FIELDS):
        return Rival(summary=other, effect=None, reason=reason)
    metric = metric_by_name("global_samples_per_s")
    effect = estimate_effect(fastest.by_launch(metric), other.by_launch(metric), alpha=criteria.alpha, pairs=pairs)
    p = None if effect.p is None else min(1.0, effect.p * pairs)
    verdict = verdict_of_effect(effect, p, criteria)
    return None if verdict == "improvement" else Rival(summary=other, effect=effect, is_equal=verdict == "neutral")
