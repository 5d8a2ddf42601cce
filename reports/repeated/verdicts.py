"""Compare the verdicts of repeated runs of one matrix: `python reports/repeated/verdicts.py [RUN...] > FILE`.

Without arguments it reads the runs beside it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.certificates import certificates
from benchbox.analysis.summary import label, summarize
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from benchbox.analysis.comparability import Comparison

SETTLED = ("improvement", "regression", "neutral")


def main(paths: list[Path]) -> None:
    pairs: dict[str, list[Comparison]] = defaultdict(list)
    largest: dict[str, list[int | None]] = defaultdict(list)
    for path in paths:
        store = RunStore(path)
        run = store.run()
        summaries = summarize(run, store.records())
        results = certificates(run, summaries)
        for result in results:
            setup = label(result.batches[0].cell, ("backend", "cams", "attention", "checkpointing"))
            largest[setup].append(None if result.largest is None else result.largest.cell["batch"])
        for comparison in compare_run(run, summaries, results).walks:
            pairs[label(comparison.subject.cell, ("backend", "cams", "attention", "checkpointing"))].append(comparison)
    print(f"# {len(paths)} repetitions of one command\n")
    print("Throughput of a set-up at its fastest batch over that of zero2 at its own, with the interval, by repetition.\n")
    print("| set-up |", *(f"{number} |" for number in range(1, len(paths) + 1)))
    print("|---|" + "---|" * len(paths))
    for setup, comparisons in pairs.items():
        print(f"| {setup} |", *(f"{_text(comparison)} |" for comparison in comparisons))
    contradictions = overlaps = compared = both = settled = 0
    for comparisons in pairs.values():
        settled += sum(comparison.verdict in SETTLED for comparison in comparisons)
        for first, second in combinations(comparisons, 2):
            compared += 1
            is_settled = first.verdict in SETTLED and second.verdict in SETTLED
            both += is_settled
            contradictions += is_settled and first.verdict != second.verdict
            overlaps += _overlap(first, second)
    total = sum(map(len, pairs.values()))
    print(
        f"\n{settled} of {total} verdicts are settled. Of {compared} pairs of repetitions, {both} have two settled verdicts, ",
        end="",
    )
    print(f"of which {contradictions} differ, and the intervals of {overlaps} overlap.\n")
    print("Largest batch that fits, by repetition:\n")
    print("| set-up |", *(f"{number} |" for number in range(1, len(paths) + 1)))
    print("|---|" + "---:|" * len(paths))
    for setup, batches in largest.items():
        print(f"| {setup} |", *(f"{batch} |" for batch in batches))


def _text(comparison: Comparison) -> str:
    effect = comparison.effect
    if effect is None or effect.low is None:
        return f"{comparison.verdict}: {comparison.reason or 'too few launches'}"
    batches = [summary.cell["batch"] for summary in (comparison.subject, comparison.reference) if summary is not None]
    batch_text = " against ".join(map(str, batches))
    return f"{effect.ratio:.3f}x ({effect.low:.3f} to {effect.high:.3f}), {comparison.verdict}, batch {batch_text}"


def _overlap(first: Comparison, second: Comparison) -> bool:
    effects = (first.effect, second.effect)
    if any(effect is None or effect.low is None or effect.high is None for effect in effects):
        return False
    return max(effect.low for effect in effects) <= min(effect.high for effect in effects)


if __name__ == "__main__":
    main(
        [Path(argument) for argument in sys.argv[1:]]
        or sorted(path.parent for path in Path(__file__).parent.glob("*/run.json"))
    )
