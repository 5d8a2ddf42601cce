"""The profile of one cell, by a group of ranks that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from benchbox.errors import CellFailedError
from benchbox.launch.job import Job
from benchbox.launch.supervise.group import run_group
from benchbox.launch.supervise.outcome import failure_text
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.rank_profile import RankProfile

RANKS_FOLDER = "ranks"  # job, events and logs of the ranks, beside the traces


def profile_cell(
    cell: Cell,
    measure: MeasureSpec,
    *,
    profiled_steps: int,
    folder: Path,
    launcher: Launcher,
    policy_dirs: Sequence[Path] = (),
    stop: Callable[[], bool],
) -> list[RankProfile] | None:
    """Profile a cell, write the traces of all ranks into `folder`, and return the profiles of all ranks.

    None if `stop` ended it.

    Args:
        measure: its steps are timed without the profiler, after its warm-up.
        profiled_steps: steps under the profiler.

    Raises:
        CellFailedError: the steps did not end ok.
        ConfigurationError: the folder of the ranks was not made by benchbox.
    """
    job = Job(
        config={
            "kind": "profile",
            "cell": cell.to_dict(),
            "warmup_steps": measure.warmup_steps,
            "timed_steps": measure.steps,
            "profiled_steps": profiled_steps,
            "traces": str(folder.resolve()),
            "policy_dirs": [str(directory.resolve()) for directory in policy_dirs],
        },
        ranks=cell.world_size,
        folder=folder / RANKS_FOLDER,
        timeout_s=measure.timeout_s,
        hang_after_s=measure.hang_after_s,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for trace in folder.glob("trace-rank*.json*") if job.file.is_file() else ():
        trace.unlink()  # of an earlier profile, perhaps of more ranks
    outcome = run_group(job, launcher, stop=stop)
    if stop():
        return None
    if outcome.error is not None:
        raise CellFailedError(f"{failure_text(outcome.status, outcome.error)}; logs: {job.folder}")
    return [cast("RankProfile", read_json(job.result(rank))) for rank in range(cell.world_size)]
