"""Measured links of this machine, kept in the user's cache: latency and bandwidth of each collective between its ranks."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from benchbox.errors import RecordError
from benchbox.store.files import read_json, write_json
from benchbox.store.json_types import type_problem
from benchbox.store.record import SCHEMA_VERSION, check_version


class LinkTimes(TypedDict):
    """One collective: what was measured, and the fit of it."""

    bytes: list[int]
    seconds: list[float]  # of one call, the median of the slowest rank
    latency_s: float
    bytes_per_s: float
    median_error: float  # relative, of the fit over the measured sizes
    max_error: float


class _Entry(TypedDict):
    ranks: int
    collectives: dict[str, LinkTimes]
    measured_at: str
    benchbox_version: str


class _LinksFile(TypedDict):
    schema_version: int
    machine: str
    backends: dict[str, _Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """Measurement between ranks of one machine with one backend of torch.distributed."""

    ranks: int
    collectives: dict[str, LinkTimes]
    measured_at: str  # ISO 8601, UTC
    benchbox_version: str


def links_file(machine: str) -> Path:
    """Return the file of a machine, in `$XDG_CACHE_HOME/benchbox/links`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "benchbox" / "links" / f"{machine}.json"


def read_links(machine: str) -> dict[str, MeasuredLinks]:
    """Return the measured links of a machine by backend (gloo, nccl); empty when none were measured.

    Raises:
        RecordError: the file is damaged.
    """
    path = links_file(machine)
    if not path.is_file():
        return {}
    values = read_json(path)
    check_version(values, str(path))
    if problem := type_problem(values, _LinksFile):
        raise RecordError(f"{path}: {problem}; delete it and run benchbox doctor --links again")
    return {name: MeasuredLinks(**entry) for name, entry in values["backends"].items()}


def write_links(machine: str, backend: str, links: MeasuredLinks) -> Path:
    """Keep the links of a backend on a machine beside those of other backends, and return the path of the file."""
    values = {name: asdict(entry) for name, entry in {**read_links(machine), backend: links}.items()}
    write_json(links_file(machine), {"schema_version": SCHEMA_VERSION, "machine": machine, "backends": values})
    return links_file(machine)
