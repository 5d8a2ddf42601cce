"""The noise floor of this machine, kept in the user's cache: what launches of one cell differ by without any reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from benchbox.store.machine_cache import read_measurements, write_measurements

if TYPE_CHECKING:
    from pathlib import Path


class _Entry(TypedDict):
    sigma: float
    launches: int
    ratio: float
    cell: str
    measured_at: str
    benchbox_version: str


class _NoiseFile(TypedDict):
    schema_version: int
    machine: str
    matrices: dict[str, _Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Result of an A/A comparison of one cell on one machine."""

    sigma: float  # standard deviation of the logarithm of a launch's step time: 0.01 is 1%
    launches: int  # of both halves together
    ratio: float  # of the halves, which do not differ
    cell: str
    measured_at: str  # ISO 8601, UTC
    benchbox_version: str


def read_noise(machine: str) -> dict[str, Noise]:
    """Return the measured noise of a machine by name of the matrix; empty when none was measured.

    Raises:
        RecordError: the file is damaged.
    """
    entries = read_measurements("noise", machine, field="matrices", file_type=_NoiseFile, remedy="benchbox noise")
    return {name: Noise(**entry) for name, entry in entries.items()}


def write_noise(machine: str, matrix: str, noise: Noise) -> Path:
    """Keep the noise of a matrix on a machine beside that of other matrices, and return the path of the file."""
    return write_measurements("noise", machine, field="matrices", measurements={**read_noise(machine), matrix: noise})
