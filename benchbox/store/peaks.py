"""Measured peaks of this machine, kept in the user's cache: what one rank reaches while the others do the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from benchbox.registry.launch_record import device_type
from benchbox.store.machine_cache import known_fields, read_measurements, write_measurements

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord

BUSY_SPREAD = 0.15  # beyond which peaks are uncertain


class MeasuredRate(TypedDict):
    """A rate: the median of repetitions on the slowest rank."""

    per_s: float  # FLOP or bytes
    spread: float  # interquartile range of the repetitions, relative to their median
    repetitions: int
    size: list[int]  # (batch, rows, columns, inner) of products; bytes of copies and all-reduces


class _Entry(TypedDict):
    device: str
    ranks: int
    threads: int
    matmul: dict[str, dict[str, MeasuredRate]]
    copy: MeasuredRate
    update: MeasuredRate
    all_reduce: MeasuredRate | None
    torch: str
    measured_at: str
    benchbox_version: str


class _PeaksFile(TypedDict):
    schema_version: int
    machine: str
    groups: dict[str, _Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeaks:
    """Rates of one rank of a group on one machine."""

    device: str  # cpu or cuda
    ranks: int
    threads: int  # of each rank
    matmul: dict[str, dict[str, MeasuredRate]]  # FLOP/s by dtype and class of shape
    copy: MeasuredRate  # bytes/s, read and written together
    update: MeasuredRate  # bytes/s of updates in place, read and written together
    all_reduce: MeasuredRate | None  # bytes/s; null for one rank
    torch: str
    measured_at: str  # ISO 8601, UTC
    benchbox_version: str

    @property
    def group(self) -> str:
        """Name of the group of ranks, by which its peaks are kept."""
        return group_name(self.device, self.ranks, self.threads)

    def best_matmul(self, dtype: str) -> MeasuredRate | None:
        """Return the highest rate of products in a dtype, over the classes of shape; None where it was not measured."""
        return max(self.matmul.get(dtype, {}).values(), key=lambda rate: rate["per_s"], default=None)

    def uncertainty(self, dtypes: Iterable[str]) -> str | None:
        """Return which rates have repetitions that differ, as beside other work of the machine, and by how much; None if none.

        Args:
            dtypes: of the products whose rates are compared with; those of copies and updates always are.
        """
        products = {
            f"{dtype} {shape}": rate for dtype in dict.fromkeys(dtypes) for shape, rate in self.matmul.get(dtype, {}).items()
        }
        rates = {**products, "copy": self.copy, "update in place": self.update}
        texts = [f"{name} by {rate['spread']:.0%}" for name, rate in rates.items() if rate["spread"] > BUSY_SPREAD]
        return f"repetitions differ in {', '.join(texts)}" if texts else None

    @property
    def best_memory(self) -> MeasuredRate:
        """Highest rate of bytes, read and written together."""
        return max(self.copy, self.update, key=lambda rate: rate["per_s"])


def group_name(device: str, ranks: int, threads: int) -> str:
    """Return the name of a group of ranks: `2 cpu ranks with 1 thread`. Threads say nothing about GPUs."""
    group = f"{ranks} {device} rank{'s' if ranks > 1 else ''}"
    return group if device == "cuda" else f"{group} with {threads} thread{'s' if threads > 1 else ''}"


def no_peaks(group: str, ranks: int) -> str:
    """Return that the peaks of a group of ranks were not measured, and what measures them."""
    remedy = f"benchbox doctor --peaks --ranks {ranks} measures them on the machine of the run"
    return f"no peaks were measured for {group}; {remedy}"


def group_of(record: LaunchRecord) -> str | None:
    """Return the name of the group of ranks that a launch had; None where it did not record their device or threads."""
    observed, threads = record["observed"], (record["environment"] or {}).get("threads")
    if observed is None:
        return None
    device = device_type(observed["device"][0])
    return None if threads is None and device != "cuda" else group_name(device, record["cell"]["world_size"], threads or 0)


def read_peaks(machine: str) -> dict[str, MeasuredPeaks]:
    """Return the measured peaks of a machine by group of ranks (see `group_name`); empty when none were measured.

    Raises:
        RecordError: the file is damaged.
    """
    entries = read_measurements("peaks", machine, field="groups", file_type=_PeaksFile, remedy="benchbox doctor --peaks")
    return {name: MeasuredPeaks(**known_fields(MeasuredPeaks, entry)) for name, entry in entries.items()}


def write_peaks(machine: str, peaks: MeasuredPeaks) -> Path:
    """Keep the peaks of a group of ranks beside those of other groups, and return the path of the file."""
    return write_measurements("peaks", machine, field="groups", measurements={**read_peaks(machine), peaks.group: peaks})
