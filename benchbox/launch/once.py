"""One launch from start to record."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from benchbox.errors import RecordError
from benchbox.launch.fingerprint import policy_sha256
from benchbox.launch.outcome import judge, unreadable
from benchbox.launch.watch import watch
from benchbox.store.assemble import assemble_record
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.launch.job import Job, Launcher
    from benchbox.launch.trace import Trace

_TAIL_BYTES = 2000


def _ignore(_: Sequence[Trace]) -> None:
    pass


def _never() -> bool:
    return False


def launch_once(
    job: Job,
    launcher: Launcher,
    *,
    on_move: Callable[[Sequence[Trace]], None] = _ignore,
    stop: Callable[[], bool] = _never,
) -> dict[str, Any]:
    """Run a job to its end and return its launch record, which is not yet stored. No process of it is left afterwards.

    A launch that fails is a record too; `stop` is asked several times a second whether to give up (status `interrupted`).

    Raises:
        BenchboxError: a process of the group cannot be ended.
    """
    job.prepare()
    environment = {
        "policy_sha256": policy_sha256(job.cell.policy, job.policy_dirs),
        "launcher": launcher.name,
        "set_by_launcher": dict(launcher.variables(job.cell.world_size)),
    }
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    began = time.monotonic()
    group = launcher.start(job)
    try:
        ending = watch(job, group, on_move, stop)
    except RecordError as problem:
        ending, outcome = None, unreadable(problem)
    finally:
        group.end()
    if ending is not None:
        outcome = judge(ending, group.failures(), group_said=_tail(job))
    return assemble_record(
        cell=job.cell,
        launch=job.launch,
        measure=job.measure,
        rank_results=_results(job),
        status=outcome.status,
        error=outcome.error,
        started_at=started_at,
        duration_s=time.monotonic() - began,
        environment=environment,
    )


def _results(job: Job) -> list[dict[str, Any]]:
    """What ranks wrote at their end; a rank that wrote nothing, or nothing whole, is missing and counts as such."""
    results = []
    for rank in range(job.cell.world_size):
        try:
            results.append(read_json(job.result(rank)))
        except RecordError:
            continue
    return results


def _tail(job: Job) -> str:
    """The end of the group's log, for people."""
    try:
        with job.group_log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
