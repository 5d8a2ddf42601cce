"""Dtypes of Adam's moments in a launch record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchbox.registry.launch_record import LaunchRecord


def adam_dtypes(record: LaunchRecord) -> tuple[str, ...]:
    """Return the dtypes of Adam's moments on all ranks, such as `float32`, sorted; empty when no census was taken."""
    census = record["precision"]["census"] if record["precision"] else []
    return tuple(sorted({entry["dtype"] for entry in census if entry["kind"].startswith("exp_avg")}))
