"""`--launches auto`: rounds of launches until every pair of cells is settled or the budget ends."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.analysis.sequential import Look
    from benchbox.launch.runner import RunSummary
    from benchbox.registry.launch_record import CellDict
    from benchbox.store.run import Run, RunStore

AUTO = "auto"


def run_until_settled(
    run: "Run",
    store: "RunStore",
    *,
    launch: Callable[[int, int, Callable[[], bool]], "RunSummary"],
    label: Callable[["CellDict"], str],
    budget_s: float | None,
    console: "Console",
) -> "RunSummary":
    """Launch to the number of each look in turn, and stop when all pairs are settled, time is up or the last look was taken.

    The plan of the run is written with the launches of the last look that is complete, so that a report never judges a part of
    a look. Run again, the same looks are taken from the records that exist.

    Args:
        run: with `sequential`.
        launch: runs the pending launches after a number and up to another, while the given function allows another one.
        label: names a cell in one line.
    """
    from benchbox.analysis.sequential import look_at

    assert run.sequential is not None
    deadline = None if budget_s is None else time.monotonic() + budget_s
    looks = run.sequential["looks"]
    summary, previous = None, 0
    for number, launches in enumerate(looks, start=1):
        at_look = replace(run, measure={**run.measure, "launches": launches})
        if number == 1:
            store.write_run(at_look)
        latest = launch(previous, launches, lambda: deadline is None or time.monotonic() < deadline)
        if summary is not None:
            latest.failed_cells |= summary.failed_cells
        summary, previous = latest, launches
        if summary.stopped or summary.out_of_time:
            console.print(f"look {number} of {len(looks)} is not complete: {summary.remaining} launches are missing")
            break
        store.write_run(at_look)
        look = look_at(at_look, store.records())
        following = looks[number] if number < len(looks) else None
        for line in describe_look(look, number, len(looks), launches, following, len(run.cells), label):
            console.print(line, markup=False, soft_wrap=True)
        if not look.unsettled:
            break
    assert summary is not None
    return summary


def describe_look(
    look: "Look",
    number: int,
    of: int,
    launches: int,
    following: int | None,
    cells: int,
    label: Callable[["CellDict"], str],
) -> list[str]:
    """Return lines on what is settled, what is not, and how many launches are missing until the next look."""
    pairs = len(look.settled) + len(look.unsettled)
    lines = [f"look {number} of {of}, {launches} launches of each cell: {len(look.settled)} of {pairs} pairs settled"]
    for comparison in look.unsettled:
        effect = comparison.effect
        assert effect is not None
        interval = "" if effect.low is None else f", {effect.low:.3f}x to {effect.high:.3f}x"
        lines.append(f"  not settled: {label(comparison.subject.cell)}: {effect.ratio:.3f}x{interval}")
    lines += [f"  not compared: {label(pair.subject.cell)}: {pair.reason}" for pair in look.refused]
    if look.unsettled and following is not None:
        more = following - launches
        lines.append(f"  {more} more launches of each cell until the next look, {more * cells} in all")
    elif look.unsettled:
        lines.append("  the last look was taken: a larger --resolution or a quieter machine can settle them in a new run")
    return lines
