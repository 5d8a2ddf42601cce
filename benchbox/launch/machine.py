"""Jobs that measure this machine and train nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.errors import CellFailedError
from benchbox.launch.job import Job
from benchbox.launch.supervise.group import run_group
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.launch.job import Launcher
    from benchbox.worker.job_file import LinksJob, PeaksJob

_TIMEOUT_S = 600.0


def run_machine_job(
    config: LinksJob | PeaksJob, launcher: Launcher, ranks: int, *, hang_after_s: float, stop: Callable[[], bool]
) -> dict[str, Any] | None:
    """Run a job between `ranks` ranks of this machine, and return the result of rank 0.

    None if `stop` ended it.

    Raises:
        CellFailedError: the group did not end ok.
    """
    kind = config["kind"]
    with tempfile.TemporaryDirectory(prefix=f"benchbox-{kind}-") as folder:
        job = Job(config=config, ranks=ranks, folder=Path(folder) / kind, timeout_s=_TIMEOUT_S, hang_after_s=hang_after_s)
        outcome = run_group(job, launcher, stop=stop)
        if stop():
            return None
        if outcome.error is not None:
            raise CellFailedError(f"{kind} could not be measured: {outcome.status}: {outcome.error['message']}")
        return read_json(job.result(0))
