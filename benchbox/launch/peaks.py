"""Measurement of the peaks of this machine's devices, by a group of ranks that all work at once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from benchbox import __version__
from benchbox.launch.machine import run_machine_job
from benchbox.store.peaks import MeasuredPeaks

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.launch.job import Launcher
    from benchbox.worker.job_file import PeakSizes

# Products are (batch, rows, columns, inner), one for each class of shape. Copies are larger than the caches of processors.
SIZES: dict[str, PeakSizes] = {
    "cpu": {
        "matmul": {"large": (1, 2048, 2048, 2048), "thin": (1, 256, 1024, 1024), "batched": (16, 256, 256, 64)},
        "copy": 2**28,
        "all_reduce": 2**26,
    },
    "cuda": {
        "matmul": {"large": (1, 8192, 8192, 8192), "thin": (1, 256, 4096, 4096), "batched": (128, 1024, 1024, 128)},
        "copy": 2**31,
        "all_reduce": 2**28,
    },
}
LIMIT_S = 3.0  # of the repetitions of one size
_HANG_AFTER_S = 180.0


def measure_peaks(launcher: Launcher, ranks: int, *, stop: Callable[[], bool]) -> MeasuredPeaks | None:
    """Return the peaks of one rank while `ranks` ranks work at once.

    None if `stop` ended it.

    Raises:
        CellFailedError: the group did not end ok.
    """
    result = run_machine_job(
        {"kind": "peaks", "sizes": SIZES, "limit_s": LIMIT_S}, launcher, ranks, hang_after_s=_HANG_AFTER_S, stop=stop
    )
    if result is None:
        return None
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    return MeasuredPeaks(**result, ranks=ranks, measured_at=measured_at, benchbox_version=__version__)
