"""Measurement of the links between ranks of this machine, by a group of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from benchbox import __version__
from benchbox.errors import CellFailedError
from benchbox.launch.machine import run_machine_job
from benchbox.store.links import LinkTimes, MeasuredLinks
from benchbox.theory.link_fit import fit_link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.launch.job import Launcher

SIZES = tuple(2**power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
_HANG_AFTER_S = 120.0


def measure_links(launcher: Launcher, ranks: int, *, stop: Callable[[], bool]) -> tuple[str, MeasuredLinks] | None:
    """Return the backend of torch.distributed, and the times and fits of its collectives between `ranks` ranks.

    None if `stop` ended it.

    Raises:
        CellFailedError: the group did not end ok, or its times do not grow with the size.
    """
    result = run_machine_job({"kind": "links", "sizes": list(SIZES)}, launcher, ranks, hang_after_s=_HANG_AFTER_S, stop=stop)
    if result is None:
        return None
    try:
        collectives = {name: _fitted(times) for name, times in result["times"].items()}
    except ValueError as error:
        raise CellFailedError(f"links could not be measured: {error}; measure again on a quiet machine") from None
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    links = MeasuredLinks(ranks=ranks, collectives=collectives, measured_at=measured_at, benchbox_version=__version__)
    return result["backend"], links


def _fitted(times: Sequence[tuple[int, float]]) -> LinkTimes:
    fit = fit_link(times)
    return {
        "bytes": [size for size, _ in times],
        "seconds": [seconds for _, seconds in times],
        "latency_s": fit.latency_s,
        "bytes_per_s": fit.bytes_per_s,
        "median_error": fit.median_error,
        "max_error": fit.max_error,
    }
