"""The `peaks` job of a rank: measure the highest rates that it reaches beside the other ranks, and write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchbox.measure.peaks import all_reduce_rate, copy_rate, matmul_rates, peak_dtypes, update_rate
from benchbox.store.files import write_json
from benchbox.worker.group import join_group
from benchbox.worker.reporting import Reporter

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.measure.phases import ProgressTracker
    from benchbox.store.events import EventWriter
    from benchbox.worker.job_file import PeaksJob


def measure_peaks(job: PeaksJob, out: Path, rank: int, tracker: ProgressTracker, events: EventWriter) -> None:
    """Write `rank<r>.json`: the rates, which are the same on all ranks, and what they were measured with."""
    reporter = Reporter(tracker, events)
    reporter.enter_stage("build")
    device, _ = join_group()
    sizes, limit_s = job["sizes"][device.type], job["limit_s"]
    reporter.enter_stage("measure", len(sizes["matmul"]) * len(peak_dtypes(device)) + 3)
    matmul = matmul_rates(sizes["matmul"], device, limit_s, reporter.report_progress)
    copy = copy_rate(sizes["copy"], device, limit_s)
    reporter.report_progress()
    update = update_rate(sizes["copy"], device, limit_s)
    reporter.report_progress()
    result = {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "matmul": matmul,
        "copy": copy,
        "update": update,
        "all_reduce": all_reduce_rate(sizes["all_reduce"], device, limit_s),
        "torch": str(torch.__version__),
    }
    write_json(out / f"rank{rank}.json", result, indent=None)
