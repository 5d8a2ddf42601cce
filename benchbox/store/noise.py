"""The noise of this machine, kept in the user's cache: what launches and runs of one cell differ by without any reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from benchbox.store.machine_cache import known_fields, read_measurements, write_measurements

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class _RunEntry(TypedDict):
    started_at: str
    launches: int
    mean: float
    sigma: float
    setup: dict[str, Any]


class _Entry(TypedDict):
    sigma: float
    launches: int
    ratio: float
    cell: str
    measured_at: str
    benchbox_version: str
    runs: list[_RunEntry]
    other_runs: list[_RunEntry]


_RUNS = ("runs", "other_runs")


class _NoiseFile(TypedDict):
    schema_version: int
    machine: str
    matrices: dict[str, _Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRun:
    """Launches of one call of `benchbox noise`: between runs the machine may drift."""

    started_at: str  # of its first launch, ISO 8601, UTC
    launches: int
    mean: float  # of the logarithms of the launches' step times in seconds
    sigma: float  # their standard deviation: 0.01 is 1%
    setup: Mapping[str, Any] = field(default_factory=dict)  # what must be equal for runs to be compared, by its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Result of an A/A comparison of one cell on one machine, and the runs in which it was repeated."""

    sigma: float  # standard deviation of the logarithm of a launch's step time within a run: 0.01 is 1%
    launches: int  # of all runs
    ratio: float  # of the halves of the latest run, which do not differ
    cell: str
    measured_at: str  # ISO 8601, UTC
    benchbox_version: str
    runs: tuple[NoiseRun, ...] = ()  # the oldest first
    other_runs: tuple[NoiseRun, ...] = ()  # of another set-up, kept for a return to it


def read_noise(machine: str) -> dict[str, Noise]:
    """Return the measured noise of a machine by name of the matrix; empty when none was measured.

    That of one matrix says nothing about another, whose cells differ in how their times scatter.

    Raises:
        RecordError: the file is damaged.
    """
    entries = read_measurements("noise", machine, field="matrices", file_type=_NoiseFile, remedy="benchbox noise")
    return {
        name: Noise(
            **known_fields(Noise, entry)
            | {key: tuple(NoiseRun(**known_fields(NoiseRun, run)) for run in entry[key]) for key in _RUNS}
        )
        for name, entry in entries.items()
    }


def write_noise(machine: str, matrix: str, noise: Noise) -> Path:
    """Keep the noise of a matrix on a machine beside that of other matrices, and return the path of the file."""
    return write_measurements("noise", machine, field="matrices", measurements={**read_noise(machine), matrix: noise})
