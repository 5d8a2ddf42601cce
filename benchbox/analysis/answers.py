"""The answer of a run: the fastest set-up that fits, whether launches settle that, and whether its precision is right.

Cells that do the same work per sample form a task: the same policy, size, cameras, data and ranks. In a task backend, batch,
attention, checkpointing, compilation, padding and recipe are free. A set-up whose audit has an error is no answer, however fast
it is. Of a walk, the batch that is its fastest is a set-up: launches repeat no other, so that nothing more is learned of them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import TYPE_CHECKING, Literal

from benchbox.analysis.best_batches import has_repeats, repeats, why_walk_diverges
from benchbox.analysis.certificates import first_throughput
from benchbox.analysis.comparability import throughput_effect, verdict_of_effect, why_incomparable, why_not_judged
from benchbox.analysis.inference import ONE_TEST, Criteria, launches_to_settle
from benchbox.registry.metrics import metric_by_name
from benchbox.registry.statuses import DIVERGED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from benchbox.analysis.certificates import Certificate
    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.inference import Effect, Verdict
    from benchbox.analysis.summary import CellSummary

SETUP_FIELDS = ("backend", "shard_size", "batch", "accumulation", "attention", "checkpointing", "compile", "padding", "recipe")

_REVERSED: Mapping[Verdict, Verdict] = {"improvement": "regression", "regression": "improvement"}

# A set-up that ends so is none for this machine or this training, however often it is launched.
_RESULTS = ("oom", "unsupported", DIVERGED)

PrecisionState = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another set-up beside the fastest. `effect` is the fastest's throughput as a multiple of its."""

    summary: CellSummary
    effect: Effect | None
    verdict: Verdict = "incomparable"  # on the fastest: an improvement where the other one is slower
    reason: str | None = None  # why they cannot be compared

    @property
    def is_equal(self) -> bool:
        """Return whether launches show that no difference is relevant."""
        return self.verdict == "neutral"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer for one task. `fastest` is None when no set-up ended ok, fits and has the right precision."""

    task: Mapping[str, Any]  # the fields that all its cells share
    fastest: CellSummary | None
    rivals: tuple[Rival, ...]  # that launches do not show to be slower, the nearest first
    candidates: int  # set-ups among which the fastest was chosen
    launches: tuple[int, int]  # fewest and most of a set-up in the comparisons with the fastest
    too_large: int  # set-ups that ended ok and need more than the memory limit
    unknown_memory: int  # set-ups that ended ok and whose peak was not observed, if there is a limit
    failed: Mapping[str, int]  # number of the set-ups without a result that counts, by status
    wrong: tuple[CellSummary, ...]  # set-ups at least as fast whose precision is wrong, the fastest first
    slower_wrong: int  # other set-ups whose precision is wrong
    more_launches: int | None  # of the fastest and its nearest rival, before any difference could settle them

    @property
    def is_settled(self) -> bool:
        return self.fastest is not None and not self.unknown_speed and all(rival.is_equal for rival in self.rivals)

    @property
    def unknown_speed(self) -> Mapping[str, int]:
        """Return those of `failed` that may be the fastest once they run."""
        return {status: count for status, count in self.failed.items() if status not in _RESULTS}

    @property
    def precision(self) -> PrecisionState | None:
        return None if self.fastest is None else precision_state(self.fastest)


def answers(
    summaries: Sequence[CellSummary],
    *,
    memory_limit: int | None = None,
    criteria: Criteria = ONE_TEST,
    walks: Sequence[Certificate] = (),
    compared: Sequence[Comparison] = (),
) -> list[Answer]:
    """Return the answer for every task of a run, in the order of its cells.

    Args:
        memory_limit: bytes of a rank; set-ups with a larger peak, or an unknown one, are no candidates.
        criteria: of the tests. All pairs of every task count, because the fastest is chosen by the launches that are tested.
        walks: of the run. Their first launches chose the batches, and are not tested.
        compared: pairs of the run with its reference. One that is settled there has that verdict here too: it was chosen before
            any launch, and is tested among fewer pairs.
    """
    settled = {comparison.pair_id: comparison.verdict for comparison in compared if comparison.is_settled}
    tasks: dict[str, list[CellSummary]] = {}
    for summary in summaries:
        task = {field: value for field, value in summary.cell.items() if field not in SETUP_FIELDS}
        tasks.setdefault(json.dumps(task, sort_keys=True), []).append(summary)
    setups = [_SetUps(cells, memory_limit, walks) for cells in tasks.values()]
    pairs = sum(comb(len(of_task.candidates), 2) for of_task in setups)
    tests = _Tests(criteria=criteria, pairs=pairs, settled=settled)
    return [_answer(of_task, tests) for of_task in setups]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tests:
    """Judgement of pairs of set-ups."""

    criteria: Criteria
    pairs: int  # that share the probability of a wrong verdict
    settled: Mapping[str, Verdict]  # on pairs that are compared with the reference, by `Comparison.pair_id`

    def verdict(self, fastest: CellSummary, other: CellSummary, effect: Effect) -> Verdict:
        """Return the verdict on the fastest beside another set-up."""
        if verdict := self.settled.get(f"{fastest.cell_id}/{other.cell_id}"):
            return verdict
        if verdict := self.settled.get(f"{other.cell_id}/{fastest.cell_id}"):
            return _REVERSED.get(verdict, verdict)
        p = None if effect.p is None else min(1.0, effect.p * self.pairs)
        return verdict_of_effect(effect, p, self.criteria)


def precision_state(summary: CellSummary) -> PrecisionState:
    """Return whether the audit of a cell has an error; unknown without an audit, or with a finding that was not judged."""
    if summary.precision is None:
        return "unknown"
    severities = {finding["severity"] for finding in summary.precision["findings"]}
    return "wrong" if "error" in severities else "unknown" if "unknown" in severities else "right"


class _SetUps:
    """The set-ups of a task: those that were measured, that fit, and whose precision is not wrong, the fastest first."""

    def __init__(self, cells: Sequence[CellSummary], memory_limit: int | None, walks: Sequence[Certificate]) -> None:
        self.task = {field: value for field, value in cells[0].cell.items() if field not in SETUP_FIELDS}
        measured = sorted(
            (summary for summary in cells if summary.status == "ok" and _speed(summary)), key=_speed, reverse=True
        )
        with_peak = [summary for summary in measured if memory_limit is None or summary.peak_bytes is not None]
        self.fitting = [summary for summary in with_peak if memory_limit is None or (summary.peak_bytes or 0) <= memory_limit]
        self.too_large = len(with_peak) - len(self.fitting)
        self.unknown_memory = len(measured) - len(with_peak)
        self.failed = _failed(cells, measured, walks)
        right = [summary for summary in self.fitting if precision_state(summary) != "wrong"]
        self.candidates = _in_common_launches(_without_other_batches(right, walks))
        searched = {summary.cell_id for walk in walks for summary in walk.batches}
        # Those of which there are only launches that searched.
        self.untested = {
            summary.cell_id for summary in self.candidates if summary.cell_id in searched and not has_repeats(summary)
        }


def _failed(cells: Sequence[CellSummary], measured: Sequence[CellSummary], walks: Sequence[Certificate]) -> Mapping[str, int]:
    """Count the set-ups of a task that have no speed, by status. Of a walk all batches are one set-up."""
    with_speed = {summary.cell_id for summary in measured}
    failed = {summary.cell_id: summary.status for summary in cells if summary.cell_id not in with_speed}
    of_task = {summary.cell_id for summary in cells}
    for walk in walks:
        tried = [summary for summary in walk.batches if summary.cell_id in of_task]
        statuses = [status for summary in tried if (status := failed.pop(summary.cell_id, None)) is not None]
        if tried and why_walk_diverges(walk) is not None:
            failed[tried[0].cell_id] = DIVERGED
        elif tried and len(statuses) == len(tried):
            failed[tried[0].cell_id] = statuses[0]
    return Counter(failed.values())


def _without_other_batches(summaries: Sequence[CellSummary], walks: Sequence[Certificate]) -> list[CellSummary]:
    """Return the set-ups with one batch of each walk: the fastest in the launches that searched, which are then left out.

    A walk with a batch that trains differently has none: its other batches run the same code.
    """
    setups = {summary.cell_id: summary for summary in summaries}
    for walk in walks:
        tried = [setups.pop(summary.cell_id) for summary in walk.batches if summary.cell_id in setups]
        if tried and why_walk_diverges(walk) is None:
            fastest = max(tried, key=lambda summary: first_throughput(summary) or 0.0)
            setups[fastest.cell_id] = repeats(fastest)
    return sorted(setups.values(), key=_speed, reverse=True)


def _in_common_launches(summaries: Sequence[CellSummary]) -> list[CellSummary]:
    """Return the set-ups by their median over the launches that all have: the others were measured at other times."""
    values = [summary.by_launch(metric_by_name("global_samples_per_s")) for summary in summaries]
    numbers = set.intersection(*map(set, values)) if values else set()
    if not numbers:
        return list(summaries)
    speeds = [median(side[number] for number in numbers) for side in values]
    order = sorted(range(len(summaries)), key=lambda index: speeds[index], reverse=True)
    return [summaries[index] for index in order]


def _answer(setups: _SetUps, tests: _Tests) -> Answer:
    candidates = setups.candidates
    fastest, judged = _judge(candidates, tests) if candidates else (None, [])
    counts = [min(rival.effect.launches) for rival in judged if rival.effect is not None]
    rivals = tuple(rival for rival in judged if rival.verdict != "improvement")
    nearest = next((rival for rival in rivals if not rival.is_equal and rival.effect is not None), None)
    missing = 0
    if nearest is not None and nearest.effect is not None:
        untested = setups.untested & {nearest.summary.cell_id, fastest.cell_id if fastest else ""}
        tested = 0 if untested else min(nearest.effect.launches)
        missing = launches_to_settle(max(1, tests.pairs), alpha=tests.criteria.alpha) - tested
    wrong = [summary for summary in setups.fitting if precision_state(summary) == "wrong"]
    faster_wrong = [summary for summary in wrong if fastest is None or _speed(summary) >= _speed(fastest)]
    return Answer(
        task=setups.task,
        fastest=fastest,
        rivals=rivals,
        candidates=len(candidates),
        launches=(min(counts), max(counts)) if counts else (0, 0),
        too_large=setups.too_large,
        unknown_memory=setups.unknown_memory,
        failed=setups.failed,
        wrong=tuple(faster_wrong),
        slower_wrong=len(wrong) - len(faster_wrong),
        more_launches=missing if missing > 0 else None,
    )


def _judge(candidates: Sequence[CellSummary], tests: _Tests) -> tuple[CellSummary, list[Rival]]:
    """Return the fastest set-up and the others beside it.

    The first candidate is the fastest in the launches that all have. Two of them may have many more in common, which show that
    it is not.
    """
    fastest, *others = candidates
    judged = [_rival(fastest, summary, tests) for summary in others]
    for _ in others:
        faster = next((rival.summary for rival in judged if rival.verdict == "regression"), None)
        if faster is None:
            break
        others = [fastest, *(summary for summary in others if summary is not faster)]
        fastest = faster
        judged = [_rival(fastest, summary, tests) for summary in others]
    return fastest, judged


def _speed(summary: CellSummary) -> float:
    spread = summary.values["global_samples_per_s"]
    return 0.0 if spread is None else spread.value


def _rival(fastest: CellSummary, other: CellSummary, tests: _Tests) -> Rival:
    """Return what launches show of another set-up beside the fastest."""
    if reason := why_incomparable(fastest, other, SETUP_FIELDS) or why_not_judged(fastest, other, tests.criteria):
        return Rival(summary=other, effect=None, reason=reason)
    effect = throughput_effect(fastest, other, tests.criteria, tests.pairs)
    return Rival(summary=other, effect=effect, verdict=tests.verdict(fastest, other, effect))
