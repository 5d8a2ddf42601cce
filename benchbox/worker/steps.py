"""Steps of a rank that measures, and the points at which all ranks wait for one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchbox.measure.memory import release_cached_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.data.loading.loader import MicroBatchStream
    from benchbox.measure.phases import Instrument
    from benchbox.registry.contracts import Batch
    from benchbox.session import Session, StepResult
    from benchbox.worker.reporting import Reporter


def warm_up(
    session: Session, stream: MicroBatchStream, steps: int, instruments: Instrument, reporter: Reporter
) -> list[StepResult]:
    """Run the steps that are not timed, without the memory that construction left behind in the allocator."""
    release_cached_memory(session.device)
    results = run_steps(session, stream, steps, instruments, reporter)
    synchronize_ranks(session.device)
    return results


def run_steps(
    session: Session, stream: Iterable[Batch], count: int, instruments: Instrument, reporter: Reporter
) -> list[StepResult]:
    """Take `count` steps and report progress after each, outside of what the instruments see."""
    results = []
    for _ in range(count):
        results.append(session.step(stream, instruments))
        reporter.report_progress()
    return results


def synchronize_ranks(device: torch.device) -> None:
    """Wait until this device has finished its work, then for all ranks, so that they go on together."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
