"""The plan of an earlier command in the same run directory, and the tests that its launches have had."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.certificates import certificates
from benchbox.analysis.inference import launches_to_settle
from benchbox.analysis.sequential import looks_taken
from benchbox.analysis.summary import summarize
from benchbox.analysis.walk import walk_point
from benchbox.errors import RecordError
from benchbox.launch.resume import pending_launches
from benchbox.registry.statuses import STATUSES
from benchbox.spec.cell import Cell

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from benchbox.plan import Plan
    from benchbox.registry.launch_record import CellDict
    from benchbox.spec.cell import MeasureSpec
    from benchbox.store.run import Run, RunStore


def follow_earlier_plan(
    run: Run, store: RunStore, measure: MeasureSpec, policy_dirs: Sequence[Path], fresh: Plan | None = None
) -> Run:
    """Return the plan of a command, with the tests that the launches it goes on with have had.

    A test at 1% of launches that were tested before is wrong more often than that. The looks of `--launches auto` stay
    those of a command that takes none itself, and the numbers of launches after which other commands tested pairs are noted. If
    none of the launches that were tested is valid any more, all are another experiment, and nothing of them is left.

    Args:
        fresh: the cells and walks of which all launches are repeated, by `--fresh`.
    """
    if fresh is not None and run.cells.keys() <= {cell.cell_id for cell in fresh.cells}:
        return run
    earlier = store.run() if (store.path / "run.json").is_file() else None
    if earlier is None:
        return run
    survey = _survey(earlier, run, store, measure, policy_dirs, fresh)
    if not survey.has_valid_launches:
        return run
    taken = looks_taken(earlier)
    if run.sequential is None and earlier.sequential is not None and taken:
        return _at_last_look(earlier, run, survey.again)
    sequential = None if run.sequential is None else {**run.sequential, "looks_taken": taken}
    return replace(run, sequential=sequential, earlier_tests=_tests_before(earlier, run, store))


@dataclass(frozen=True, slots=True)
class _Survey:
    """Launches of an earlier plan: whether any is valid for the plan of now, and the ids of cells that are measured again."""

    has_valid_launches: bool
    again: set[str]


def _survey(
    earlier: Run, run: Run, store: RunStore, measure: MeasureSpec, policy_dirs: Sequence[Path], fresh: Plan | None
) -> _Survey:
    """Return which launches of an earlier plan are left.

    Launches may be missing without being measured again: those of a cell that was not selected, or of a look that was
    interrupted. A walk of which a batch is outdated searches again. Cells whose policy the plan does not have any more are left
    out: it may be gone.
    """
    policies = {cell["policy"] for cell in run.cells.values()}
    repeated = {cell.cell_id for cell in fresh.cells} if fresh else set()
    points = {walk_point(cell.to_dict()) for cell in fresh.walks} if fresh else set()
    again = {cell_id for cell_id, cell in earlier.cells.items() if cell_id in repeated or walk_point(cell) in points}
    planned = earlier.planned_launches()
    tested = [
        (Cell.from_dict(dict(cell)), number)
        for cell_id, cell in earlier.cells.items()
        if cell["policy"] in policies and cell_id not in again
        for number in range(1, planned[cell_id] + 1)
        if store.record(cell_id, number)
    ]
    outdated = pending_launches(tested, measure, store, policy_dirs, final=STATUSES).launches
    again |= {cell.cell_id for cell, _ in outdated}
    again |= {cell_id for walk in earlier.walks if again & {*walk["cells"]} for cell_id in walk["cells"]}
    again |= earlier.cells.keys() - earlier.cells_of_walks - {cell.cell_id for cell, _ in tested}
    return _Survey(len(outdated) < len(tested), again)


def _at_last_look(earlier: Run, run: Run, again: Collection[str]) -> Run:
    """Return the plan of a command that takes no look, at the last look of an earlier plan.

    Pairs with a cell that is measured again are judged again, and the others keep their verdicts.
    """
    assert earlier.sequential is not None
    added = {cell_id: run.launches for cell_id in run.cells if cell_id not in earlier.cells}
    judged_before = earlier.cells.keys() - again
    sequential = {
        **earlier.sequential,
        "launches": _launches_of_pairs(earlier, run, again, earlier.sequential["launches"] | added),
        "settled": {
            pair_id: verdict
            for pair_id, verdict in earlier.sequential.get("settled", {}).items()
            if judged_before >= {*pair_id.split("/")}
        },
    }
    measured = {**run.measure, "launches": _last_look(earlier)}
    return replace(run, sequential=sequential, measure=measured, earlier_tests=earlier.earlier_tests)


def _last_look(earlier: Run) -> int:
    """Return the launches of the last look; of the first one where a command was interrupted that took the looks again."""
    assert earlier.sequential is not None
    first: int = earlier.sequential["looks"][0]
    return max(earlier.launches, first)


def _launches_of_pairs(earlier: Run, run: Run, again: Collection[str], early: dict[str, int]) -> dict[str, int]:
    """Return the launches of cells that have fewer than the last look, equal for both cells of a pair that is judged again.

    The other cell of such a pair has the launches of its reference, which are those of the last of its pairs. Walks that
    search again may choose another batch, which is launched up to the last look: so is the walk that it is compared with.
    """
    tables: dict[str, list[str]] = defaultdict(list)  # a reference and the cells that are compared with it
    cells, walked, last = {**earlier.cells, **run.cells}, earlier.cells_of_walks, _last_look(earlier)
    for cell_id, cell in cells.items():
        values = cast("CellDict", {**cell, **run.reference})
        tables[walk_point(values) if cell_id in walked else json.dumps(values, sort_keys=True)].append(cell_id)
    for table in tables.values():
        references = {cell_id for cell_id in table if cells[cell_id].items() >= run.reference.items()}
        judged = {*table} if references & {*again} else {*table} & {*again}
        if not judged or not references:
            continue
        if judged <= walked:
            early = {cell_id: launches for cell_id, launches in early.items() if cell_id not in judged | references}
        else:
            early |= dict.fromkeys(judged, early.get(references.pop(), last))
    return {cell_id: launches for cell_id, launches in early.items() if launches != last}


def _tests_before(earlier: Run, run: Run, store: RunStore) -> list[int]:
    """Return the numbers of launches after which pairs were tested before, other than that of a plan without looks.

    Launches that are too few to settle any pair were no test.
    """
    tests = {*earlier.earlier_tests}
    if earlier.sequential is None and earlier.reference and _settles_pairs(earlier, store):
        tests.add(earlier.launches)
    return sorted(tests if run.sequential else tests - {run.launches})


def _settles_pairs(earlier: Run, store: RunStore) -> bool:
    """Return whether the launches of a plan are enough to settle a pair."""
    try:
        summaries = summarize(earlier, store.records())
    except RecordError:  # of a cell whose launches are repeated: what they were is unknown
        return earlier.launches - bool(earlier.walks) >= launches_to_settle(1)
    compared = compare_run(earlier, summaries, certificates(earlier, summaries))
    effects = [pair.effect for pair in (*compared.cells.values(), *compared.walks) if pair.effect]
    return any(effect.low is not None for effect in effects)


def describe_earlier_tests(run: Run) -> str | None:
    """Return the line of a command on the tests that its launches have had before; None if they had none."""
    if run.earlier_tests:
        numbers = " and ".join(str(number - bool(run.walks)) for number in run.earlier_tests)
        return (
            f"pairs were tested after {numbers} launches before: more launches until a verdict comes make a wrong one more "
            "probable; --launches auto tests them several times without that"
        )
    if run.sequential:
        return (
            f"pairs stay judged by the look of --launches auto after launch {run.launches}: launches that it lacks are "
            "measured, and none beyond it; --launches auto goes on; --fresh without --only, or another folder with --out, "
            "begins anew"
        )
    return None
