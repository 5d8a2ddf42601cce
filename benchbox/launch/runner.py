"""Running the launches of a plan one after another, into a run directory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from benchbox.launch.launch import launch_cell
from benchbox.launch.resume import pending_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.launch.progress import Progress
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.run import RunStore

# Another launch of the same cell would end the same way, so the cell is not launched again within one invocation.
_NON_RETRYABLE = ("unsupported", "mismatch", "oom")
# So would that of a cell which failed in the same way this often in a row. One failure may be of the machine.
_SAME_FAILURES = 3


@dataclass(slots=True)
class RunSummary:
    """Numbers of launches of one invocation, by what became of them."""

    reused: int = 0  # an ok record existed
    executed: int = 0
    skipped: int = 0  # another launch of the cell would end as its earlier ones
    remaining: int = 0  # the user stopped before they had ended
    failed_cells: set[str] = field(default_factory=set)  # ids of cells with a launch that did not end ok
    stopped: bool = False
    out_of_time: bool = False  # `may_start` ended the invocation

    @property
    def has_ended(self) -> bool:
        """Return whether the user or the budget ended the invocation before its last launch."""
        return self.stopped or self.out_of_time

    def followed_by(self, later: RunSummary) -> RunSummary:
        """Return the summary of these launches and later ones of the same invocation."""
        return replace(
            later,
            reused=self.reused + later.reused,
            executed=self.executed + later.executed,
            skipped=self.skipped + later.skipped,
            failed_cells=self.failed_cells | later.failed_cells,
        )


def run_matrix(
    launches: Sequence[tuple[Cell, int]],
    *,
    measure: MeasureSpec,
    store: RunStore,
    launcher: Launcher,
    progress: Progress,
    policy_dirs: Sequence[Path],
    stop: Callable[[], bool],
    may_start: Callable[[], bool] = lambda: True,
) -> RunSummary:
    """Run the pending launches in this order and store a record of each. A launch that fails does not stop the others.

    Args:
        may_start: whether there is time for another launch; a launch that has begun is not ended.

    Raises:
        RecordError: a record of an earlier run cannot be read.
        BenchboxError: a process cannot be ended, and would disturb the next measurement.
    """
    pending = pending_launches(launches, measure, store, policy_dirs, launcher=launcher)
    summary = RunSummary(reused=pending.reused)
    failures = _Failures()
    with progress.display(list(launches), pending.launches, pending.notes):
        for index, (cell, launch) in enumerate(pending.launches):
            if stop():
                summary.stopped = True
                summary.remaining = len(pending.launches) - index
                break
            if not may_start():
                summary.out_of_time = True
                summary.remaining = len(pending.launches) - index
                break
            if cell.cell_id in failures.hopeless:
                # A record that an earlier run stored here is no longer true of this cell.
                store.remove_record(cell.cell_id, launch)
                summary.skipped += 1
                progress.launch_skipped(cell, launch, failures.hopeless[cell.cell_id])
                continue
            progress.launch_started(cell, launch)
            record = launch_cell(
                cell,
                measure,
                launch=launch,
                folder=store.launch_dir(cell.cell_id, launch),
                launcher=launcher,
                policy_dirs=policy_dirs,
                on_progress=progress.ranks_progressed,
                stop=stop,
            )
            store.write_record(record)
            progress.launch_ended(record)
            if record["status"] == "interrupted":
                summary.stopped = True
                summary.remaining = len(pending.launches) - index
                break
            summary.executed += 1
            if record["status"] != "ok":
                summary.failed_cells.add(cell.cell_id)
            failures.add(record)
    return summary


class _Failures:
    """Failures of the cells of one invocation. `hopeless` has the status of those that another launch would not change."""

    def __init__(self) -> None:
        self.hopeless: dict[str, str] = {}  # cell id -> status
        self._last: dict[str, tuple[str, str, int]] = {}  # cell id -> status, type of error, how often in a row

    def add(self, record: LaunchRecord) -> None:
        cell_id, status = record["cell_id"], record["status"]
        kind = record["error"]["type"] if record["error"] else ""
        *last, times = self._last.get(cell_id, ("", "", 0))
        times = times + 1 if last == [status, kind] else 1
        self._last[cell_id] = (status, kind, times)
        if status in _NON_RETRYABLE or (status != "ok" and times == _SAME_FAILURES):
            self.hopeless[cell_id] = status
