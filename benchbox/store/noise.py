"""The noise floor of this machine, kept in the user's cache: what launches of one cell differ by without any reason."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from benchbox.errors import RecordError
from benchbox.store.files import read_json, write_json
from benchbox.store.json_types import type_problem
from benchbox.store.record import SCHEMA_VERSION, check_version


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


def noise_file(machine: str) -> Path:
    """Return the file of a machine, in `$XDG_CACHE_HOME/benchbox/noise`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "benchbox" / "noise" / f"{machine}.json"


def read_noise(machine: str) -> dict[str, Noise]:
    """Return the measured noise of a machine by name of the matrix; empty when none was measured.

    Raises:
        RecordError: the file is damaged.
    """
    path = noise_file(machine)
    if not path.is_file():
        return {}
    values = read_json(path)
    check_version(values, str(path))
    if problem := type_problem(values, _NoiseFile):
        raise RecordError(f"{path}: {problem}; delete it and run benchbox noise again")
    return {name: Noise(**entry) for name, entry in values["matrices"].items()}


def write_noise(machine: str, matrix: str, noise: Noise) -> Path:
    """Keep the noise of a matrix on a machine beside that of other matrices, and return the path of the file."""
    entries = {**read_noise(machine), matrix: noise}
    values = {name: asdict(entry) for name, entry in entries.items()}
    write_json(noise_file(machine), {"schema_version": SCHEMA_VERSION, "machine": machine, "matrices": values})
    return noise_file(machine)
