"""Running the launches of a plan one after another, into a run directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchbox.launch.launch import launch_cell
from benchbox.launch.resume import pending_launches
from benchbox.launch.supervise.group import never_stop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.launch.progress import Progress
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.run import RunStore

# A launch of the same cell would end the same way: no time is spent on finding that out again within one invocation.
_WOULD_END_THE_SAME = ("unsupported", "mismatch", "oom")


@dataclass(slots=True)
class RunSummary:
    """What one invocation did."""

    kept: int = 0  # launches that were ok already
    ran: int = 0
    spared: int = 0  # launches not run because an earlier one of the same cell would end the same way
    left: int = 0  # launches not run because the user stopped
    failed: set[str] = field(default_factory=set)  # ids of cells of which a launch did not end ok
    stopped: bool = False


def run_matrix(
    launches: Sequence[tuple[Cell, int]],
    *,
    measure: MeasureSpec,
    store: RunStore,
    launcher: Launcher,
    progress: Progress,
    policy_dirs: Sequence[Path] = (),
    fresh: bool = False,
    stop: Callable[[], bool] = never_stop,
) -> RunSummary:
    """Run what is still missing of these launches, in this order, and store a record of each. A failure stops nothing.

    Raises:
        RecordError: a record of an earlier run cannot be read.
        BenchboxError: a process cannot be ended, and would disturb whatever is measured next.
    """
    work = pending_launches(launches, measure, store, policy_dirs, fresh=fresh)
    summary = RunSummary(kept=work.kept)
    non_retryable: dict[str, str] = {}  # cell id -> the status every launch of it would have
    with progress.running(list(launches), work.launches, work.notes):
        for position, (cell, launch) in enumerate(work.launches):
            if stop():
                summary.stopped = True
                summary.left = len(work.launches) - position
                break
            if cell.cell_id in non_retryable:
                # What an earlier run may have recorded here is no longer true of this cell.
                store.record_path(cell.cell_id, launch).unlink(missing_ok=True)
                summary.spared += 1
                progress.spared(cell, launch, non_retryable[cell.cell_id])
                continue
            progress.began(cell, launch)
            record = launch_cell(
                cell,
                measure,
                launch=launch,
                folder=store.launch_dir(cell.cell_id, launch),
                launcher=launcher,
                policy_dirs=policy_dirs,
                on_progress=progress.moved,
                stop=stop,
            )
            store.write_record(record)
            progress.ended(record)
            if record["status"] == "interrupted":
                summary.stopped = True
                summary.left = len(work.launches) - position
                break
            summary.ran += 1
            if record["status"] != "ok":
                summary.failed.add(cell.cell_id)
            if record["status"] in _WOULD_END_THE_SAME:
                non_retryable[cell.cell_id] = record["status"]
    return summary
