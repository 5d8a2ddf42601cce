"""`--launches auto`: rounds of launches until every pair of cells is settled or the budget ends."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from benchbox.analysis.quantities import counted

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.inference import Verdict
    from benchbox.analysis.sequential import Look
    from benchbox.launch.resume import Launches
    from benchbox.launch.runner import RunSummary
    from benchbox.plan import Plan
    from benchbox.registry.launch_record import CellDict
    from benchbox.store.run import Run, RunStore

    Label = Callable[[CellDict], str]

AUTO = "auto"
_VERDICTS = {"improvement": "faster", "regression": "slower", "neutral": "no relevant difference"}


@dataclass(frozen=True, slots=True)
class Budget:
    """Time in which launches may begin. Without `seconds` it does not end."""

    seconds: float | None = None
    started_at: float = field(default_factory=time.monotonic)

    def has_time(self) -> bool:
        return self.seconds is None or time.monotonic() - self.started_at < self.seconds


def plan_auto(run: "Run", planned: "Plan", resolution: float) -> "Run":
    """Return the plan of a run that looks at its pairs several times. Cells beside walks have the launches of the matrix."""
    from benchbox.analysis.sequential import plan_looks

    sequential = plan_looks(run, resolution, search=bool(planned.walks))
    if not planned.walks:
        return replace(run, sequential=sequential)
    fixed = run.cells.keys() - {cell.cell_id for cell in planned.walks}
    sequential["launches"] = dict.fromkeys(sorted(fixed), run.launches)
    return replace(run, sequential=sequential, measure={**run.measure, "launches": 1})


def run_until_settled(
    run: "Run",
    store: "RunStore",
    *,
    selected: Collection[str],
    launch: "Callable[[Launches], RunSummary]",
    label: "Label",
    console: "Console",
) -> "RunSummary":
    """Launch to the number of each look in turn, until all pairs are settled, time is up or the last look was taken.

    Cells whose pairs are settled are not launched again. The plan of the run is written with the launches of the last look that
    is complete, so that a report never judges a part of a look. Before the first look it has the launches of that one, and says
    that no look was taken. The same command takes the same looks again from the records.

    Args:
        run: with `sequential`; its walks have ended.
        selected: ids of the cells that may be launched.
        launch: runs those of some launches that are pending, and stores their records, while there is time.
        label: names a cell in one line.
    """
    from benchbox.analysis.sequential import look_at
    from benchbox.launch.runner import RunSummary
    from benchbox.plan import rounds
    from benchbox.spec.cell import Cell

    assert run.sequential is not None
    looks = run.sequential["looks"]
    active = {walk["fastest"] for walk in run.walks if walk["fastest"]} if run.walks else set(run.cells)
    early = dict(run.sequential["launches"])  # launches of cells that are not launched any more
    settled: dict[str, Verdict] = {}
    look: Look | None = None
    summary, previous = RunSummary(), int(bool(run.walks))
    for number, launches in enumerate(looks, start=1):
        if number == 1:
            store.write_run(_at_look(run, launches, early, settled, taken=run.sequential["looks_taken"]))
        cells = [Cell.from_dict(dict(cell)) for cell_id, cell in run.cells.items() if cell_id in active & {*selected}]
        numbers = range(previous + 1, launches + 1)
        summary = summary.followed_by(launch(rounds(cells, numbers)))
        if summary.has_ended:
            _print(console, describe_interruption(look, number, len(looks), summary, label))
            return summary
        complete = {cell_id for cell_id in active if all(store.record(cell_id, number) for number in numbers)}
        if look is not None:  # cells that were not selected may lack launches
            early |= dict.fromkeys(active - complete, previous)
        at_look = _at_look(run, launches, early, settled, taken=number)
        store.write_run(at_look)
        earlier, look = look, look_at(at_look, store.records())
        _print(console, describe_look(look, earlier, number, len(looks), launches, label))
        unsettled = [ids for pair in look.unsettled if (ids := _cell_ids(pair)) <= complete]
        active = set().union(*unsettled)
        if not active & {*selected}:
            break
        settled |= {pair.pair_id: pair.verdict for pair in look.settled}
        early |= {cell_id: launches for cell_id in run.cells if cell_id not in active and cell_id not in early}
        if number < len(looks):
            more, remaining = looks[number] - launches, len(active & {*selected})
            _print(console, [f"{more} more launches of {remaining} cells until the next look, {more * remaining} in all"])
        previous = launches
    assert look is not None
    _print(console, describe_end(look, is_last=number == len(looks)))
    return summary


def _at_look(run: "Run", launches: int, early: dict[str, int], settled: "dict[str, Verdict]", *, taken: int) -> "Run":
    sequential = {**(run.sequential or {}), "looks_taken": taken, "launches": dict(early), "settled": dict(settled)}
    return replace(run, measure={**run.measure, "launches": launches}, sequential=sequential)


def _cell_ids(pair: "Comparison") -> set[str]:
    return {summary.cell_id for summary in (pair.subject, pair.reference) if summary is not None}


def _print(console: "Console", lines: Iterable[str]) -> None:
    from benchbox.report.rows import say

    for line in lines:
        say(console, line)


def describe_look(look: "Look", earlier: "Look | None", number: int, of: int, launches: int, label: "Label") -> list[str]:
    """Return lines on the pairs that are settled and those that are not; what an earlier look has said is left out."""
    said = {pair.subject.cell_id for pair in (*earlier.settled, *earlier.refused)} if earlier else set()
    pairs = len(look.settled) + len(look.unsettled)
    return [
        f"look {number} of {of}, after launch {launches}: {len(look.settled)} of {pairs} pairs settled",
        *(
            f"  settled: {_describe_pair(pair, label)}: {_VERDICTS[pair.verdict]}"
            for pair in look.settled
            if pair.subject.cell_id not in said
        ),
        *_unsettled(look, label),
        *(
            f"  not compared: {label(pair.subject.cell)}: {pair.reason}"
            for pair in look.refused
            if pair.subject.cell_id not in said
        ),
    ]


def describe_interruption(look: "Look | None", number: int, of: int, summary: "RunSummary", label: "Label") -> list[str]:
    """Return lines on why the launches ended before a look, and on the pairs that the last complete look has not settled."""
    cause = "the budget ended" if summary.out_of_time else "stopped"
    text = f"{cause} before look {number} of {of}: {counted(summary.remaining, 'launch', 'launches')} missing"
    if look is None:
        return [f"{text}, and no pair was judged"]
    return [text, *_unsettled(look, label)]


def describe_end(look: "Look", *, is_last: bool) -> list[str]:
    """Return why no more launches follow."""
    if not look.settled and not look.unsettled:
        return ["stopped: no pair can be compared"]
    if not look.unsettled:
        return ["stopped: every pair that can be compared is settled"]
    count = f"{counted(len(look.unsettled), 'pair is', 'pairs are')} not settled"
    if is_last:
        return [f"stopped: the last look was taken, and {count}: a larger --resolution or a quieter machine can settle more"]
    return [f"stopped: {count}, of cells that were not selected"]


def _unsettled(look: "Look", label: "Label") -> list[str]:
    return [f"  not settled: {_describe_pair(pair, label)}" for pair in look.unsettled]


def _describe_pair(pair: "Comparison", label: "Label") -> str:
    effect = pair.effect
    assert effect is not None
    interval = "" if effect.low is None else f", {effect.low:.3f}x to {effect.high:.3f}x"
    return f"{label(pair.subject.cell)}: {effect.ratio:.3f}x{interval}"
