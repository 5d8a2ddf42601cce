"""Measurements of a machine, kept in the user's cache: one JSON file for each kind of measurement and machine."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.errors import RecordError
from benchbox.store.files import read_json, write_json
from benchbox.store.json_types import type_problem
from benchbox.store.record import SCHEMA_VERSION, check_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from _typeshed import DataclassInstance


def user_cache() -> Path:
    """Return the folder of benchbox in the user's cache, `$XDG_CACHE_HOME/benchbox`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "benchbox"


def machine_file(kind: str, machine: str) -> Path:
    """Return the file of a machine, in `$XDG_CACHE_HOME/benchbox/<kind>`."""
    return user_cache() / kind / f"{machine}.json"


def read_measurements(kind: str, machine: str, *, field: str, file_type: Any, remedy: str) -> dict[str, dict[str, Any]]:
    """Return the measurements of a machine by name; empty when nothing was measured.

    Args:
        field: of the file, which has the measurements.
        file_type: the TypedDict of the file.
        remedy: the command that measures again.

    Raises:
        RecordError: the file is damaged.
    """
    path = machine_file(kind, machine)
    if not path.is_file():
        return {}
    values = read_json(path)
    check_version(values, str(path))
    if problem := type_problem(values, file_type):
        raise RecordError(f"{path}: {problem}; delete it and run {remedy} again")
    measurements: dict[str, dict[str, Any]] = values[field]
    return measurements


def known_fields(measurement: type[DataclassInstance], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an entry that a measurement has: a newer benchbox may have written more."""
    return {declared.name: entry[declared.name] for declared in fields(measurement) if declared.name in entry}


def write_measurements(kind: str, machine: str, *, field: str, measurements: dict[str, DataclassInstance]) -> Path:
    """Write the measurements of a machine by name, and return the path of the file."""
    path = machine_file(kind, machine)
    entries = {name: asdict(measurement) for name, measurement in measurements.items()}
    write_json(path, {"schema_version": SCHEMA_VERSION, "machine": machine, field: entries})
    return path
