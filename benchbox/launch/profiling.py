"""The profile of one cell, by a group of ranks that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from benchbox.analysis.profile import build_profile
from benchbox.errors import CellFailedError
from benchbox.launch.job import Job
from benchbox.launch.supervise.group import ignore_progress, run_group
from benchbox.store.files import read_json, write_json
from benchbox.store.peaks import read_peaks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.analysis.profile import Profile
    from benchbox.launch.job import Launcher
    from benchbox.launch.supervise.trace import Trace
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.rank_profile import RankProfile

FILE = "profile.json"
RANKS_FOLDER = "ranks"  # beside it: job, events and logs of the ranks


def profile_cell(
    cell: Cell,
    measure: MeasureSpec,
    *,
    profiled_steps: int,
    folder: Path,
    launcher: Launcher,
    policy_dirs: Sequence[Path] = (),
    on_progress: Callable[[Sequence[Trace]], None] = ignore_progress,
    stop: Callable[[], bool],
) -> Profile | None:
    """Profile a cell, write `profile.json` and the traces of all ranks into `folder`, and return the profile.

    None if `stop` ended it.

    Args:
        measure: its steps are timed without the profiler, after its warm-up.
        profiled_steps: steps under the profiler.

    Raises:
        CellFailedError: the steps did not end ok.
        RecordError: the file of the peaks is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for trace in folder.glob("trace-rank*.json*"):
        trace.unlink()  # of an earlier profile, perhaps of more ranks
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
    outcome = run_group(job, launcher, on_progress=on_progress, stop=stop)
    if stop():
        return None
    if outcome.error is not None:
        error = outcome.error
        location = "" if error["rank"] is None else f" rank {error['rank']}"
        location += "" if error["phase"] is None else f" phase {error['phase']}"
        raise CellFailedError(f"{outcome.status}{location}: {error['type']}: {error['message']}; logs: {job.folder}")
    ranks = [cast("RankProfile", read_json(job.result(rank))) for rank in range(cell.world_size)]
    profile = build_profile(cell.cell_id, cell.to_dict(), ranks, read_peaks(ranks[0]["machine"]))
    write_json(folder / FILE, profile)
    return profile
