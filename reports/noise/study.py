"""Rate of false verdicts, and of slowdowns that are found: `python reports/noise/study.py RUN... > reports/noise/verdicts.md`.

A run of one cell (`benchbox noise`) is cut into consecutive comparisons of 5 against 5 launches, odd against even ones as a run
interleaves two cells. They do not differ, so that every verdict "faster" or "slower" is false. The same comparisons are judged
once more with the launches of one side scaled by 5%. A run of two cells is cut into comparisons of 5 rounds: the second cell is
5% slower for real. Every comparison is judged as a pair of a report is: `estimate_effect`, `holm` and `verdict_of_effect`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median, stdev
from typing import TYPE_CHECKING

from benchbox.analysis.comparability import verdict_of_effect
from benchbox.analysis.inference import ALPHA, ONE_TEST, RELEVANT, estimate_effect, holm
from benchbox.analysis.noise import split_launches
from benchbox.analysis.summary import BUSY_HOST, summarize
from benchbox.registry.metrics import metric_by_name
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchbox.analysis.comparability import Verdict
    from benchbox.analysis.inference import Effect
    from benchbox.analysis.summary import CellSummary

LAUNCHES = 5  # of each side of a comparison
SLOWDOWN = 1.05  # of the step, as in noise.yaml

Sides = tuple[dict[int, float], dict[int, float]]  # metric by round: of the subject and of the reference


@dataclass(frozen=True, slots=True)
class Judged:
    """One comparison. A rejected one has a p of at most 1%, whether its difference is relevant or not."""

    verdict: Verdict
    effect: Effect

    @property
    def is_rejected(self) -> bool:
        return self.effect.p is not None and self.effect.p <= ALPHA


def equal_comparisons(values: Mapping[int, float], launches: int = LAUNCHES) -> list[Sides]:
    """Return comparisons of launches of one cell, by number, that follow one another; those that lack a launch are left out."""
    size = 2 * launches
    blocks = range(max(values, default=0) // size)
    numbered = [{number: values.get(block * size + number) for number in range(1, size + 1)} for block in blocks]
    complete = [{number: value for number, value in block.items() if value is not None} for block in numbered]
    return [split_launches(block) for block in complete if len(block) == size]


def paired_comparisons(subject: Mapping[int, float], reference: Mapping[int, float], launches: int = LAUNCHES) -> list[Sides]:
    """Return comparisons of two cells in consecutive rounds; those that lack a launch are left out."""
    rounds = range(max([*subject, *reference], default=0) // launches)
    sides = [
        tuple(
            {number: side[n] for number in range(1, launches + 1) if (n := block * launches + number) in side}
            for side in (subject, reference)
        )
        for block in rounds
    ]
    return [(ours, theirs) for ours, theirs in sides if len(ours) == len(theirs) == launches]


def slowed(comparisons: Iterable[Sides], factor: float = SLOWDOWN) -> list[Sides]:
    """Return comparisons whose subject is slower: samples per second fall as step times grow."""
    return [({number: value / factor for number, value in ours.items()}, theirs) for ours, theirs in comparisons]


def judge(comparisons: Iterable[Sides]) -> list[Judged]:
    """Judge every comparison as a report judges a table of one pair."""
    effects = [estimate_effect(ours, theirs) for ours, theirs in comparisons]
    return [Judged(verdict_of_effect(effect, holm([effect.p])[0], ONE_TEST), effect) for effect in effects]


def interval(count: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a rate (Clopper and Pearson, Biometrika 26, 1934)."""
    from scipy.stats import beta

    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(beta.ppf(tail, count, of - count + 1))
    high = 1.0 if count == of else float(beta.ppf(1 - tail, count + 1, of - count))
    return low, high


def noise_within(comparisons: Sequence[Sides]) -> float:
    """Return the median over comparisons of the standard deviation of a side's launches, of logarithms: 0.01 is 1%."""
    return median(stdev(math.log(value) for value in side.values()) for sides in comparisons for side in sides)


def main(paths: Sequence[Path]) -> None:
    print("# Verdicts on equal launches, and on launches that are 5% slower\n")
    rows = []
    for path in paths:
        store = RunStore(path)
        summaries = summarize(store.run(), store.records())
        throughput = [summary.by_launch(metric_by_name("global_samples_per_s")) for summary in summaries]
        if len(summaries) == 1:
            comparisons = equal_comparisons(throughput[0])
            named = {"equal": comparisons, "5% slower, scaled": slowed(comparisons)}
        elif len(summaries) == 2:
            comparisons = paired_comparisons(throughput[1], throughput[0])
            named = {"5% slower, injected": comparisons}
        else:
            raise SystemExit(f"{path}: {len(summaries)} cells, and one or two are expected")
        if not comparisons:
            raise SystemExit(f"{path}: too few launches for a comparison of {LAUNCHES} against {LAUNCHES}")
        print(_describe(path, summaries, comparisons))
        rows += [(name, judge(sides)) for name, sides in named.items()]
    print("\n| launches | comparisons | faster | slower | no relevant difference | not settled | median ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, judged in rows:
        counts = Counter(comparison.verdict for comparison in judged)
        numbers = " | ".join(str(counts[verdict]) for verdict in ("improvement", "regression", "neutral", "inconclusive"))
        ratio = median(comparison.effect.ratio for comparison in judged)
        print(f"| {name} | {len(judged)} | {numbers} | {ratio:.3f}x |")
    print()
    for name, judged in rows:
        print(f"- {_sentence(name, judged)}")


def _describe(path: Path, summaries: Sequence[CellSummary], comparisons: Sequence[Sides]) -> str:
    launches = sum(len(summary.ok) for summary in summaries)
    busy = [BUSY_HOST for summary in summaries if BUSY_HOST in summary.marks]
    environment = (summaries[0].ok[-1]["environment"] or {}) if summaries[0].ok else {}
    sigma = noise_within(comparisons)
    quantile = NormalDist().inv_cdf(1 - ALPHA / 2)
    shown = math.exp(quantile * sigma * math.sqrt(2 / LAUNCHES)) - 1
    text = f"`{path.name}`: {launches} launches on {environment.get('machine', 'an unknown machine')}; within a comparison "
    text += f"launches differ by {sigma:.1%} (standard deviation): about half of all differences of {shown:.1%} would be shown."
    return text + (" Some launches ran on a busy host." if busy else "")


def _sentence(name: str, judged: Sequence[Judged]) -> str:
    total, differences = len(judged), [item for item in judged if item.verdict in ("improvement", "regression")]
    hidden = sum(item.is_rejected for item in judged) - len(differences)
    share = f"the relevance of {RELEVANT:.0%} kept {hidden} of {hidden + len(differences)} rejected equalities from a verdict"
    if name == "equal":
        low, high = interval(len(differences), total)
        rate = f"{len(differences)} of {total} verdicts are false alarms, {len(differences) / total:.1%}"
        return f"{name}: {rate} ({low:.1%} to {high:.1%} with 95% confidence; {ALPHA:.0%} is allowed); {share}."
    found = sum(item.verdict == "regression" for item in judged)
    wrong = sum(item.verdict in ("improvement", "neutral") for item in judged)
    low, high = interval(found, total)
    rate = f"{found} of {total} slowdowns are found, {found / total:.1%} ({low:.1%} to {high:.1%} with 95% confidence)"
    return f"{name}: {rate}, and {wrong} verdicts are false; {share}."


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
