"""Rows of `metrics.jsonl`, as far as two runs of the same training have the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MEASURED = frozenset(
    {
        *("step_s", "outside_steps_s", "data_wait_s", "mfu", "mfu_reason"),
        *("allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes"),
    }
)


def without_measurements(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without times, memory and utilisation."""
    return [{name: value for name, value in row.items() if name not in _MEASURED} for row in rows]
