"""The noise of this machine, kept in the user's cache: what launches and runs of one cell differ by without any reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from benchbox.store.machine_cache import read_measurements, write_measurements

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class _SessionEntry(TypedDict):
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
    sessions: NotRequired[list[_SessionEntry]]  # entries of earlier versions have none
    other_sessions: NotRequired[list[_SessionEntry]]


_SESSIONS = ("sessions", "other_sessions")


class _NoiseFile(TypedDict):
    schema_version: int
    machine: str
    matrices: dict[str, _Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSession:
    """Launches of one call of `benchbox noise`: between sessions the machine may drift."""

    started_at: str  # of its first launch, ISO 8601, UTC
    launches: int
    mean: float  # of the logarithms of the launches' step times in seconds
    sigma: float  # their standard deviation: 0.01 is 1%
    setup: Mapping[str, Any] = field(default_factory=dict)  # what must be equal for sessions to be compared, by its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Result of an A/A comparison of one cell on one machine, and the sessions in which it was repeated."""

    sigma: float  # standard deviation of the logarithm of a launch's step time within a session: 0.01 is 1%
    launches: int  # of all sessions
    ratio: float  # of the halves of the latest session, which do not differ
    cell: str
    measured_at: str  # ISO 8601, UTC
    benchbox_version: str
    sessions: tuple[NoiseSession, ...] = ()  # the oldest first
    other_sessions: tuple[NoiseSession, ...] = ()  # of another set-up, kept for a return to it


def read_noise(machine: str) -> dict[str, Noise]:
    """Return the measured noise of a machine by name of the matrix; empty when none was measured.

    Raises:
        RecordError: the file is damaged.
    """
    entries = read_measurements("noise", machine, field="matrices", file_type=_NoiseFile, remedy="benchbox noise")
    return {
        name: Noise(**entry | {key: tuple(NoiseSession(**session) for session in entry.get(key, ())) for key in _SESSIONS})
        for name, entry in entries.items()
    }


def write_noise(machine: str, matrix: str, noise: Noise) -> Path:
    """Keep the noise of a matrix on a machine beside that of other matrices, and return the path of the file."""
    return write_measurements("noise", machine, field="matrices", measurements={**read_noise(machine), matrix: noise})
