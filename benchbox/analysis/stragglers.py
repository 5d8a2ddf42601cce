"""Ranks that are slower than the others, with the reason: their own work, a core that others used, or their data.

All ranks end a step together, so the times of steps do not tell which rank the others waited for. The split of the step does
(`step_split_s` of a launch record). A rank is named when it spends longer than the others on one of its own parts in so many
steps of a launch that chance explains it, of any rank and any part that takes time, with a probability of at most 1%, and when
that part and all its own parts together are longer by a share of the step that matters.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from math import comb
from statistics import fmean, median
from typing import TYPE_CHECKING

from benchbox.analysis.inference import ALPHA
from benchbox.analysis.quantities import quantity
from benchbox.registry.phases import STEP_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import Phase

OWN_PARTS = ("data_wait", "compute", "core_wait")  # for them no other rank is needed
RELEVANT = 0.05  # of the step, by which a rank must be behind
NOTICEABLE = 0.25  # of the step, spent in transfers or in waiting for changing ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is behind the others in a launch, and the part of the step in which it falls behind most."""

    rank: int
    part: str
    lag_s: float  # by which it spends longer than the others on `part`, in a median step
    share: float  # relative to what the others spend; infinite where they spend nothing


def find_straggler(split: Mapping[str, Phase]) -> Straggler | None:
    """Return the rank that is behind in the steps of a launch, or None."""
    step_s, ranks = median(_step_times(split)), len(split["compute"]["per_rank"])
    # The same for all ranks: without a difference between them chance puts each behind as often.
    parts = [part for part in OWN_PARTS if max(map(median, split[part]["per_rank"])) >= RELEVANT * step_s]
    lags = {(rank, part): _lags(split[part]["per_rank"], rank) for part in parts for rank in range(ranks)}
    own_s = [
        [math.fsum(values) for values in zip(*(split[part]["per_rank"][rank] for part in OWN_PARTS), strict=True)]
        for rank in range(ranks)
    ]
    slow = {rank for rank in range(ranks) if median(_lags(own_s, rank)) >= RELEVANT * step_s}
    behind = {
        (rank, part): lag_s
        for (rank, part), steps in lags.items()
        if rank in slow and _p_value(steps) * len(lags) <= ALPHA and (lag_s := median(steps)) >= RELEVANT * step_s
    }
    if not behind:
        return None
    rank, part = max(behind, key=lambda key: behind[key])
    lag_s = behind[rank, part]
    rest_s = median(split[part]["per_rank"][rank]) - lag_s
    return Straggler(rank=rank, part=part, lag_s=lag_s, share=lag_s / rest_s if rest_s > 0 else math.inf)


def _step_times(split: Mapping[str, Phase]) -> list[float]:
    """Return the times of the steps of rank 0, which all ranks end together."""
    return [math.fsum(parts) for parts in zip(*(split[part]["per_rank"][0] for part in STEP_PARTS), strict=True)]


def _lags(times: Sequence[Sequence[float]], rank: int) -> list[float]:
    """Return by how much longer a rank takes than the median of the others, by step."""
    others = [steps for other, steps in enumerate(times) if other != rank]
    return [time - median(values) for time, values in zip(times[rank], zip(*others, strict=True), strict=True)]


def _p_value(lags: Sequence[float]) -> float:
    """Return the probability of at least as many positive lags by chance: the one-sided sign test."""
    positive, steps = sum(lag > 0 for lag in lags), len(lags)
    return float(sum(comb(steps, count) for count in range(positive, steps + 1)) / 2**steps)


def mean_split(summary: CellSummary) -> dict[str, list[float]]:
    """Return seconds of every part in a mean step on every rank, mean over launches; empty where no launch has a split."""
    splits = [split for times in summary.times.values() if (split := times.split())]
    if not splits:
        return {}
    return {part: [fmean(values) for values in zip(*(split[part] for split in splits), strict=True)] for part in STEP_PARTS}


def describe_ranks(summary: CellSummary) -> str | None:
    """Return a sentence on the rank of a cell that is behind, or on what all ranks wait for; None if nothing stands out."""
    stragglers = [times.straggler for times in summary.times.values() if times.has_split]
    if not stragglers:
        return None
    named = Counter((straggler.rank, straggler.part) for straggler in stragglers if straggler is not None)
    if named:
        (rank, part), count = named.most_common(1)[0]
        examples = [s for s in stragglers if s is not None and (s.rank, s.part) == (rank, part)]
        launches = "" if count == len(stragglers) else f", in {count} of {len(stragglers)} launches"
        return _sentence(examples) + launches
    waiting = find_waiting(summary)
    return str(waiting) if waiting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The wait of all ranks of a cell at their collectives: for which part, and its share of their steps."""

    part: str  # transfer | rank_wait
    share: float
    can_name: bool  # whether a launch has steps enough to show that one rank is always the last

    @property
    def awaited(self) -> str:
        """Return the words for it."""
        return "transfers" if self.part == "transfer" else "one another"

    def __str__(self) -> str:
        text = f"the ranks wait for {self.awaited}: {self.share:.0%} of the step"
        if self.part == "transfer":
            return text
        return f"{text}, and no rank is always the last" if self.can_name else f"{text}; too few steps to say for which rank"


def find_waiting(summary: CellSummary) -> Waiting | None:
    """Return what all ranks wait for, if that is a noticeable share of the step: transfers before one another."""
    split = mean_split(summary)
    step_s = sum(fmean(times) for times in split.values())
    for part in ("transfer", "rank_wait"):
        share = fmean(split[part]) / step_s if step_s and part in split else 0.0
        if share >= NOTICEABLE:
            steps = max(record["steps"] for record in summary.ok)
            return Waiting(part=part, share=share, can_name=0.5**steps * summary.cell["world_size"] <= ALPHA)
    return None


def _sentence(examples: Sequence[Straggler]) -> str:
    rank, part = examples[0].rank, examples[0].part
    lag = quantity(median(straggler.lag_s for straggler in examples), "s")
    share = median(straggler.share for straggler in examples)
    if part == "data_wait":
        return f"rank {rank} waited {lag} a step longer for data than the others"
    if part == "core_wait":
        return f"rank {rank} had no core for {lag} a step more than the others: something else ran on it"
    longer = f"{share:.0%} longer" if share < 10 else "longer"
    return f"rank {rank} computed {longer} than the others: {lag} a step"
