"""Ranks that are slower than the others, with the reason: their own work, a core that others used, or their data.

All ranks end a step together, so the times of steps do not tell which rank the others waited for. The split of the step does
(`step_split_s` of a launch record). A rank is named when it is behind in so many steps of a launch that chance explains it with
a probability of at most 1%, and by a share of the step that matters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
    from benchbox.registry.launch_record import LaunchRecord, Phase

OWN_PARTS = ("data_wait", "compute", "core_wait")  # for them no other rank is needed
RELEVANT = 0.05  # of the step, by which a rank must be behind
NOTICEABLE = 0.25  # of the step, spent in transfers or in waiting for changing ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is behind the others in a launch. `part` is what it spends most of the difference on."""

    rank: int
    part: str
    behind_s: float  # in a median step, all of its own parts together
    part_s: float  # of that, in `part`
    share: float  # `part_s` relative to what the others spend on that part; infinite where they spend nothing


def find_straggler(split: Mapping[str, Phase], steps_s: Sequence[Sequence[float]]) -> Straggler | None:
    """Return the rank that is behind in a launch, or None. `steps_s` are times [rank][step]."""
    own = [_sum_parts(split, rank) for rank in range(len(steps_s))]
    if len(own) < 2:
        return None
    step_s = median(steps_s[0])
    found = []
    for rank, times in enumerate(own):
        lags = [time - _median_of_others(own, rank, step) for step, time in enumerate(times)]
        if median(lags) >= RELEVANT * step_s and _p_value(lags) * len(own) <= ALPHA:
            found.append((median(lags), rank))
    if not found:
        return None
    behind_s, rank = max(found)
    part, part_s, others_s = max(
        ((part, *_part_lag(split[part]["per_rank"], rank)) for part in OWN_PARTS), key=lambda entry: entry[1]
    )
    share = part_s / others_s if others_s > 0 else float("inf")
    return Straggler(rank=rank, part=part, behind_s=behind_s, part_s=part_s, share=share)


def _sum_parts(split: Mapping[str, Phase], rank: int) -> list[float]:
    return [sum(parts) for parts in zip(*(split[part]["per_rank"][rank] for part in OWN_PARTS), strict=True)]


def _median_of_others(times: Sequence[Sequence[float]], rank: int, step: int) -> float:
    return median(steps[step] for other, steps in enumerate(times) if other != rank)


def _part_lag(times: Sequence[Sequence[float]], rank: int) -> tuple[float, float]:
    """Return by how much longer a rank takes for a part than the others, and what they take, in a median step."""
    others = [_median_of_others(times, rank, step) for step in range(len(times[rank]))]
    return median(time - other for time, other in zip(times[rank], others, strict=True)), median(others)


def _p_value(lags: Sequence[float]) -> float:
    """Return the probability of at least as many positive lags by chance: the one-sided sign test."""
    positive, steps = sum(lag > 0 for lag in lags), len(lags)
    return sum(comb(steps, count) for count in range(positive, steps + 1)) / 2**steps


def mean_split(summary: CellSummary) -> dict[str, list[float]]:
    """Return seconds of every part in a mean step on every rank, mean over launches; empty where no launch has a split."""
    by_part: dict[str, list[list[float]]] = defaultdict(list)  # part -> [launch][rank]
    for record in _split_records(summary):
        for part, times in (record["step_split_s"] or {}).items():
            by_part[part].append([fmean(steps) for steps in times["per_rank"]])
    order = [part for part in STEP_PARTS if part in by_part]
    return {part: [fmean(values) for values in zip(*by_part[part], strict=True)] for part in order}


def _split_records(summary: CellSummary) -> list[LaunchRecord]:
    return [record for record in summary.ok if record.get("step_split_s") and record["step_time_s"]]


def describe_ranks(summary: CellSummary) -> str | None:
    """Return one sentence on the ranks of a cell: which one is behind and why, or what all wait for; None if nothing stands out."""
    records = _split_records(summary)
    if not records:
        return None
    stragglers = [
        find_straggler(record["step_split_s"] or {}, (record["step_time_s"] or {"per_rank": []})["per_rank"])
        for record in records
    ]
    named = Counter((straggler.rank, straggler.part) for straggler in stragglers if straggler is not None)
    if named:
        (rank, part), count = named.most_common(1)[0]
        examples = [s for s in stragglers if s is not None and (s.rank, s.part) == (rank, part)]
        launches = "" if count == len(records) else f", in {count} of {len(records)} launches"
        return _sentence(examples) + launches
    split = mean_split(summary)
    step_s = sum(fmean(times) for times in split.values())
    shares = {part: fmean(split[part]) / step_s for part in ("transfer", "rank_wait")} if step_s else {}
    if shares.get("transfer", 0.0) >= NOTICEABLE:
        return f"the ranks wait for transfers: {shares['transfer']:.0%} of the step"
    if shares.get("rank_wait", 0.0) >= NOTICEABLE:
        return f"the ranks wait for one another: {shares['rank_wait']:.0%} of the step, and no rank is always the last"
    return None


def _sentence(examples: Sequence[Straggler]) -> str:
    rank, part = examples[0].rank, examples[0].part
    lag = quantity(median(straggler.part_s for straggler in examples), "s")
    share = median(straggler.share for straggler in examples)
    if part == "data_wait":
        return f"rank {rank} waited {lag} a step longer for data than the others"
    if part == "core_wait":
        return f"rank {rank} had no core for {lag} a step more than the others: something else ran on it"
    longer = f"{share:.0%} longer" if share < 10 else "longer"
    return f"rank {rank} computed {longer} than the others: {lag} a step"
