"""Checks of launch records: the schema version, the required keys, the status."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypedDict

from benchbox.errors import RecordError
from benchbox.registry.launch_record import LaunchRecord
from benchbox.registry.statuses import STATUSES
from benchbox.store.json_types import type_problem

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from benchbox.registry.launch_record import CellDict

SCHEMA_VERSION = 1
_LARGEST = sys.float_info.max


class _CellTypes(TypedDict, total=False):
    """Fields of a cell that analysis and reports calculate with or name."""

    policy: str
    size: str
    backend: str
    recipe: str
    world_size: int
    batch: int
    accumulation: int
    cams: int
    data: dict[str, Any]
    optim: dict[str, Any]


def samples_per_step(cell: CellDict) -> int:
    """Return the number of samples that all ranks together consume in one optimizer step."""
    return int(cell["batch"] * cell["accumulation"] * cell["world_size"])


def check_version(value: Mapping[str, Any], where: str) -> None:
    """Raise RecordError if a file has no schema version or was written by a newer benchbox.

    Raises:
        RecordError: the message says what to do.
    """
    version = value.get("schema_version")
    if not isinstance(version, int):
        raise RecordError(f"{where}: no schema_version, so not written by benchbox")
    if version > SCHEMA_VERSION:
        raise RecordError(f"{where}: schema version {version}; this benchbox reads up to {SCHEMA_VERSION}: upgrade it")


def check_keys(value: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise RecordError if an object of a file has another key: this version may misread what a newer benchbox wrote.

    Raises:
        RecordError: the message names the key.
    """
    if unknown := sorted(value.keys() - set(known)):
        message = f"has the key {unknown[0]!r}, which this benchbox does not know"
        raise RecordError(f"{where}: {message}: written by a newer benchbox; upgrade this one")


def check_record(value: Mapping[str, Any], where: str, remedy: str = "delete it and run again") -> None:
    """Raise RecordError unless `value` is a launch record that this version can read.

    Raises:
        RecordError: a newer schema, an unknown status, missing keys, a value of another type than declared, or a time or a
            throughput that is not above zero.
    """
    check_version(value, where)
    if problem := type_problem(value, LaunchRecord) or type_problem(value["cell"], _CellTypes, "cell"):
        raise RecordError(f"{where}: {problem}; {remedy}")
    if value["status"] not in STATUSES:
        raise RecordError(f"{where}: unknown status {value['status']!r}")
    if empty := _empty_measurement(value):
        raise RecordError(f"{where}: {empty}: empty, and values of every rank are expected; {remedy}")
    if other := _of_other_ranks(value):
        raise RecordError(f"{where}: {other}: values of as many ranks as in step_time_s.per_rank are expected; {remedy}")
    if impossible := _impossible_measurement(value):
        raise RecordError(f"{where}: {impossible}: a number above zero is expected; {remedy}")


def _empty_measurement(value: Mapping[str, Any]) -> str | None:
    """Return the first key of a record that holds lists of measurements, one of which is empty."""
    for key in ("step_time_s", "memory"):
        if value[key] is not None and not all(value[key]["per_rank"] or [None]):
            return f"{key}.per_rank"
    if value["step_time_s"] is not None and not value["step_time_s"]["slowest"]:
        return "step_time_s.slowest"
    phases = value["phases_s"] or {}
    return next((f"phases_s.{name}.per_rank" for name, phase in phases.items() if not all(phase["per_rank"] or [None])), None)


def _of_other_ranks(value: Mapping[str, Any]) -> str | None:
    """Return the first key of a record that has the times of more or fewer ranks than its steps have."""
    if value["step_time_s"] is None:
        return None
    ranks = len(value["step_time_s"]["per_rank"])
    parts = {key: value.get(key) or {} for key in ("phases_s", "step_split_s")}
    lists = {f"{key}.{name}.per_rank": part["per_rank"] for key, named in parts.items() for name, part in named.items()}
    return next((key for key, entries in lists.items() if len(entries) != ranks), None)


def _impossible_measurement(value: Mapping[str, Any]) -> str | None:
    """Return the first key of a record that holds a time or a throughput which is not above zero, or no number."""
    times = value["step_time_s"]["slowest"] if value["step_time_s"] else ()
    rates = [value["throughput"]["global_samples_per_s"]] if value["throughput"] else ()
    numbers = {"step_time_s.slowest": times, "throughput.global_samples_per_s": rates}
    return next((key for key, entries in numbers.items() if not all(0 < entry <= _LARGEST for entry in entries)), None)


def share_equal_values(value: dict[str, Any], other: Mapping[str, Any], depth: int = 2) -> dict[str, Any]:
    """Return a record whose values are those of another one where they are equal, also inside of nested objects.

    Equal values have the same text: 0.0 is neither -0.0 nor 0, and the hash of the record must stay what it is.

    Names are interned: a parsed record has its own copy of each, which takes more memory than most of its values.
    """
    shared: dict[str, Any] = {}
    for key, item in value.items():
        same = other.get(key)
        if item == same and repr(item) == repr(same):
            item = same
        elif depth and isinstance(item, dict) and isinstance(same, dict):
            item = share_equal_values(item, same, depth - 1)
        shared[sys.intern(key)] = item
    return shared
