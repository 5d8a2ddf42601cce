"""The `links` job of a rank: time collectives of several sizes and write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.measure.links import COLLECTIVES, time_collectives
from benchbox.store.files import write_json
from benchbox.worker.group import join_group
from benchbox.worker.reporting import Reporter

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.measure.phases import ProgressTracker
    from benchbox.store.events import EventWriter
    from benchbox.worker.job_file import LinksJob


def measure_links(job: LinksJob, out: Path, rank: int, tracker: ProgressTracker, events: EventWriter) -> None:
    """Write `rank<r>.json`: the backend, and (bytes, seconds) by collective."""
    reporter = Reporter(tracker, events)
    reporter.enter_stage("build")
    device, backend = join_group()
    reporter.enter_stage("measure", len(job["sizes"]) * len(COLLECTIVES))
    times = time_collectives(job["sizes"], device, reporter.report_progress)
    write_json(out / f"rank{rank}.json", {"backend": backend, "times": times}, indent=None)
