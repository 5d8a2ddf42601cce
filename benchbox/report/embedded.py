"""Data that the page of a report carries beside its tables, compressed: a browser reads it without a network."""

from __future__ import annotations

import base64
import gzip
import json
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import UNKNOWN

if TYPE_CHECKING:
    from benchbox.report.columns import CellValue
    from benchbox.report.view import Report


def embedded_data(report: Report) -> str:
    """Return columns, sort keys and, of a large run, the cards as base64 of gzip-compressed JSON.

    `columns` has the name, `number` and `facet` of every column, `keys` a list for every column with a key for every row, null
    where the value is unknown, and `cards` a list for every row: title, command, and groups of a title and rows of three texts.
    """
    columns = report.table.columns
    facets = {*report.axes, "status", "attention kernel", "Adam state", "findings"}
    data: dict[str, Any] = {
        "columns": [
            {"name": column.name, "number": column.number, "facet": column.name in facets} for column in columns
        ],
        "keys": [[_sort_key(row[index]) for row in report.table.rows] for index in range(len(columns))],
    }
    if report.is_large:
        data["cards"] = [
            [card.title, card.command, [[group.title, group.rows] for group in card.groups]] for card in report.cards
        ]
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode("ascii")


def _sort_key(value: CellValue) -> float | str | None:
    """Return the key that a value sorts by: six significant digits are more than it shows."""
    if value.text == UNKNOWN:
        return None
    return float(f"{value.sort:.6g}") if isinstance(value.sort, float) else value.sort
