"""One launch of a cell, from its job to its record."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from benchbox.audit.record import build_precision_record, read_facts
from benchbox.errors import RecordError
from benchbox.launch.fingerprint import benchbox_sha256, data_sha256, policy_sha256
from benchbox.launch.job import Job
from benchbox.launch.supervise.group import ignore_progress, never_stop, run_group
from benchbox.store.assemble import assemble_record
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.launch.supervise.trace import Trace
    from benchbox.registry.launch_environment import LaunchEnvironment
    from benchbox.registry.launch_record import LaunchRecord, Precision
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.rank_result import RankResult
    from benchbox.worker.job_file import MeasureJob


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
    """Measure a cell once, in a process group of its own, and return the launch record without storing it.

    A launch that fails returns a record as well.

    Args:
        launch: number of the launch, from 1.
        folder: for the files of the ranks; emptied first.
        on_progress: see `run_group`.
        stop: see `run_group`.

    Raises:
        BenchboxError: a process of the group cannot be ended.
        ConfigurationError: the policy does not exist.
    """
    config: MeasureJob = {
        "kind": "measure",
        "cell": cell.to_dict(),
        "measure": asdict(measure),
        "policy_dirs": [str(directory.resolve()) for directory in policy_dirs],
        "launch": launch,
    }
    job = Job(
        config=config,
        ranks=cell.world_size,
        folder=folder,
        timeout_s=measure.timeout_s,
        hang_after_s=measure.hang_after_s,
        nnodes=launcher.nnodes,
    )
    # Before the ranks read them: a policy or a dataset that is changed meanwhile makes this launch outdated.
    policy_sources, data_files = policy_sha256(cell.policy, policy_dirs), data_sha256(cell.data)
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    start = time.monotonic()
    outcome = run_group(job, launcher, on_progress=on_progress, stop=stop)
    duration_s = time.monotonic() - start
    environment: LaunchEnvironment = {  # of the launcher as it is now: it may have had to start new interpreters
        "benchbox_sha256": benchbox_sha256(),
        "policy_sha256": policy_sources,
        "data_sha256": data_files,
        "launcher": launcher.name,
        "set_by_launcher": dict(launcher.variables(cell.world_size)),
    }
    return assemble_record(
        cell=cell,
        launch=launch,
        measure=measure,
        rank_results=_read_results(job),
        status=outcome.status,
        error=outcome.error,
        started_at=started_at,
        duration_s=duration_s,
        environment=environment,
        precision=_audit(job),
    )


def _audit(job: Job) -> Precision | None:
    """Audit the facts that the ranks wrote; None unless all of them wrote theirs."""
    try:
        return build_precision_record(read_facts(job.folder, job.ranks))
    except RecordError:
        return None


def _read_results(job: Job) -> list[RankResult]:
    """Read the results of ranks. A rank whose result is missing or damaged is left out, and counts as missing."""
    results = []
    for rank in range(job.ranks):
        try:
            results.append(cast("RankResult", read_json(job.result(rank))))
        except RecordError:
            continue
    return results
