"""Measured links of this machine, kept in the user's cache: latency and bandwidth of each collective between its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from benchbox.store.machine_cache import known_fields, read_measurements, write_measurements

if TYPE_CHECKING:
    from pathlib import Path


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


def link_backend(device: str) -> str:
    """Return the backend of torch.distributed whose links ranks on a kind of device (cpu, cuda) have."""
    return "nccl" if device == "cuda" else "gloo"


def read_links(machine: str) -> dict[str, MeasuredLinks]:
    """Return the measured links of a machine by backend (gloo, nccl); empty when none were measured.

    Raises:
        RecordError: the file is damaged.
    """
    entries = read_measurements("links", machine, field="backends", file_type=_LinksFile, remedy="benchbox doctor --links")
    return {name: MeasuredLinks(**known_fields(MeasuredLinks, entry)) for name, entry in entries.items()}


def write_links(machine: str, backend: str, links: MeasuredLinks) -> Path:
    """Keep the links of a backend on a machine beside those of other backends, and return the path of the file."""
    return write_measurements("links", machine, field="backends", measurements={**read_links(machine), backend: links})
