"""One launch of a cell, from its job to its record."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from benchbox.audit.record import build_precision_record, read_facts
from benchbox.errors import RecordError
from benchbox.launch.fingerprint import policy_sha256
from benchbox.launch.job import Job
from benchbox.launch.supervise.group import ignore_progress, never_stop, run_group
from benchbox.store.assemble import assemble_record
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.launch.supervise.trace import Trace
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.rank_result import RankResult
    from benchbox.store.record import ErrorRecord, LaunchRecord, Precision


def launch_cell(
    cell: Cell,
    measure: MeasureSpec,
    *,
    launch: int,
    folder: Path,
    launcher: Launcher,
    policy_dirs: Sequence[Path] = (),
    on_progress: Callable[[Sequence[Trace]], None] = ignore_progress,
    stop: Callable[[], bool] = never_stop,
) -> LaunchRecord:
    """Measure a cell once, in a process group of its own, and return the launch record, which is not yet stored.

    A launch that fails is a record too. `folder` is made anew for what the ranks leave; `on_move` and `stop` as in `run_group`.

    Raises:
        BenchboxError: a process of the group cannot be ended.
        ConfigurationError: the policy does not exist.
    """
    told = {
        "cell": cell.to_dict(),
        "measure": asdict(measure),
        "policy_dirs": [str(each.resolve()) for each in policy_dirs],
        "launch": launch,
    }
    job = Job(
        kind="measure",
        ranks=cell.world_size,
        told=told,
        folder=folder,
        timeout_s=measure.timeout_s,
        hang_after_s=measure.hang_after_s,
    )
    environment = {
        "policy_sha256": policy_sha256(cell.policy, policy_dirs),
        "launcher": launcher.name,
        "set_by_launcher": dict(launcher.variables(cell.world_size)),
    }
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    began = time.monotonic()
    outcome = run_group(job, launcher, on_progress=on_progress, stop=stop)
    return assemble_record(
        cell=cell,
        launch=launch,
        measure=measure,
        rank_results=_results(job),
        status=outcome.status,
        error=cast("ErrorRecord | None", outcome.error),
        started_at=started_at,
        duration_s=time.monotonic() - began,
        environment=environment,
        precision=_precision(job),
    )


def _precision(job: Job) -> Precision | None:
    """What the audit makes of what the ranks saw; None unless all of them came to see anything."""
    try:
        return cast("Precision", build_precision_record(read_facts(job.folder, job.ranks)))
    except RecordError:
        return None


def _results(job: Job) -> list[RankResult]:
    """What ranks wrote at their end; a rank that wrote nothing, or nothing whole, is missing and counts as such."""
    results: list[RankResult] = []
    for rank in range(job.ranks):
        try:
            results.append(cast("RankResult", read_json(job.result(rank))))
        except RecordError:
            continue
    return results
