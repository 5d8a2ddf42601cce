"""The plan of an earlier command in the same run directory, and the tests that its launches have had."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.certificates import certificates
from benchbox.analysis.summary import summarize
from benchbox.launch.resume import pending_launches
from benchbox.registry.statuses import STATUSES
from benchbox.spec.cell import Cell

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.spec.cell import MeasureSpec
    from benchbox.store.run import Run, RunStore


def follow_earlier_plan(run: Run, store: RunStore, measure: MeasureSpec, policy_dirs: Sequence[Path]) -> Run:
    """Return the plan of a command, with the tests that the launches it goes on with have had.

    A test at 1% of launches that were tested before is wrong more often than that. The looks of `--launches auto` stay
    those of a command that takes none itself, and the numbers of launches after which other commands tested pairs are noted. If
    any of the launches that were tested is outdated, all are another experiment, and nothing of them is left.
    """
    earlier = store.run() if (store.path / "run.json").is_file() else None
    if earlier is None or not _are_current(earlier, run, store, measure, policy_dirs):
        return run
    if earlier.sequential is None or run.sequential is not None:
        return replace(run, earlier_tests=_tests_before(earlier, run, store))
    if earlier.launches < earlier.sequential["looks"][0]:  # it was interrupted while walks searched
        return run
    added = {cell_id: run.launches for cell_id in run.cells if cell_id not in earlier.cells}
    sequential = {**earlier.sequential, "launches": earlier.sequential["launches"] | added}
    measured = {**run.measure, "launches": earlier.launches}
    return replace(run, sequential=sequential, measure=measured, earlier_tests=earlier.earlier_tests)


def _are_current(earlier: Run, run: Run, store: RunStore, measure: MeasureSpec, policy_dirs: Sequence[Path]) -> bool:
    """Return whether there are launches of the earlier plan, and none of them is outdated.

    Some may be missing: of a cell that was not selected, or of a look that was interrupted. Cells whose policy the plan does
    not have any more are left out: it may be gone.
    """
    policies = {cell["policy"] for cell in run.cells.values()}
    cells = {id_: Cell.from_dict(dict(cell)) for id_, cell in earlier.cells.items() if cell["policy"] in policies}
    planned = earlier.planned_launches()
    tested = [
        (cell, number)
        for cell_id, cell in cells.items()
        for number in range(1, planned[cell_id] + 1)
        if store.record(cell_id, number)
    ]
    return bool(tested) and not pending_launches(tested, measure, store, policy_dirs, final=STATUSES).launches


def _tests_before(earlier: Run, run: Run, store: RunStore) -> list[int]:
    """Return the numbers of launches after which pairs were tested before, other than that of a plan without looks.

    Launches that are too few to settle any pair were no test.
    """
    tests = {*earlier.earlier_tests}
    if earlier.sequential is None and earlier.reference:
        summaries = summarize(earlier, store.records())
        compared = compare_run(earlier, summaries, certificates(earlier, summaries))
        effects = [pair.effect for pair in (*compared.cells.values(), *compared.walks) if pair.effect]
        if any(effect.low is not None for effect in effects):
            tests.add(earlier.launches)
    return sorted(tests if run.sequential else tests - {run.launches})


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
            f"pairs stay judged by the look of --launches auto after launch {run.launches}, and nothing is launched beyond it: "
            "--launches auto goes on; --fresh, or another folder with --out, begins anew"
        )
    return None
