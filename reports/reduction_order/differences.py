"""Print the largest differences of loss and gradient norm by recipe: `python reports/reduction_order/differences.py [RUN...]`.

Without arguments it reads every published run. Tolerances of recipes follow from this table.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from benchbox.analysis.equivalence import QUANTITIES
from benchbox.analysis.summary import summarize
from benchbox.registry.recipes import JUDGED_STEPS
from benchbox.store.run import RunStore

STEPS = {"first": slice(0, 1), "2 to 5": slice(1, 5), "6 to 10": slice(5, 10), "11 to 22": slice(10, JUDGED_STEPS)}


def main(runs: list[Path]) -> None:
    largest: dict[str, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    cells: dict[str, int] = defaultdict(int)
    for run in runs:
        store = RunStore(run)
        for summary in summarize(store.run(), store.records()):
            equivalence = summary.equivalence
            if equivalence is None or equivalence.differences is None:
                continue
            cells[summary.cell["recipe"]] += 1
            for name in QUANTITIES:
                for steps, part in STEPS.items():
                    values = [value for value in equivalence.differences[name].values[part] if value is not None]
                    entry = largest[summary.cell["recipe"]]
                    entry[name, steps] = max([entry[name, steps], *values])
    print("| recipe | cells |", *(f"{name}, {steps} |" for name in ("loss", "norm") for steps in STEPS))
    print("|---|---:|" + "---:|" * (2 * len(STEPS)))
    for recipe, entry in largest.items():
        print(f"| {recipe} | {cells[recipe]} |", *(f"{value:.1e} |" for value in entry.values()))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or sorted(path.parent for path in Path("reports").glob("*/run.json")))
