"""Compressed data in the page of a report, which a browser reads offline, and styles of the table's columns."""

from __future__ import annotations

import base64
import gzip
import re
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, to_json

from benchbox.analysis.quantities import UNKNOWN
from benchbox.store.files import json_text

if TYPE_CHECKING:
    from benchbox.report.columns import CellValue
    from benchbox.report.view import Report

_FACETS = ("status", "attention kernel", "Adam state", "findings")


def compress_data(data: Any) -> str:
    """Return data as base64 of gzip-compressed JSON. Equal data give equal text.

    Numbers that are not finite are null: JSON has none, and a page that cannot read its data has a table without controls.
    """
    try:
        text = to_json(data, inf_nan_mode="null")
    except PydanticSerializationError:  # a text is not Unicode, such as the path in an error: of these, JSON has escapes
        text = json_text(data).encode("ascii")
    return base64.b64encode(gzip.compress(text, compresslevel=6, mtime=0)).decode("ascii")


def table_data(report: Report) -> dict[str, Any]:
    """Return name, `number` and `facet` of every column, and its `keys`: what a row sorts by, null where it is unknown."""
    return {
        "columns": [
            {
                "name": column.name,
                "number": column.number,
                "facet": column.name in _FACETS or column.name in report.axes,
                "keys": [_sort_key(row[index]) for row in report.table.rows],
            }
            for index, column in enumerate(report.table.columns)
        ]
    }


def card_data(report: Report) -> list[Any]:
    """Return `[title, command, [[title of a group, [[name, text, remark], ...]], ...]]` for every cell."""
    return [[card.title, card.command, [[group.title, group.rows] for group in card.groups]] for card in report.cards]


def _sort_key(value: CellValue) -> float | str | None:
    """Return the key that a value sorts by, to six significant digits: more than it shows."""
    if value.text == UNKNOWN:
        return None
    return float(f"{value.sort:.6g}") if isinstance(value.sort, float) else value.sort


def table_style(report: Report) -> str:
    """Return CSS for the columns: numbers to the right, names for narrow screens, and columns that paper has no room for.

    Rules for a column cost a line; a class or a name in every table cell would be most of the file.
    """
    rules, dropped = [], []
    for position, column in enumerate(report.table.columns, start=2):
        nth = f":nth-child({position})"
        if column.number:
            rules.append(f"@media (min-width:641px),print{{#cells-table {nth}:is(th,td){{text-align:right}}}}")
        rules.append(f'@media (max-width:640px){{#cells-table td{nth}::before{{content:"{_css_text(column.name)}"}}}}')
        if not (column.brief or column.name in report.axes or column.name in ("findings", "status")):
            dropped.append(f"#cells-table {nth}:is(th,td)")
    if dropped:
        rules.append(f"@media print,(max-width:640px){{{','.join(dropped)}{{display:none}}}}")
    return "\n" + "\n".join(rules)


def _css_text(text: str) -> str:
    """Escape text for a string of CSS within a page: nothing but letters, digits and spaces stays as it is."""
    return re.sub(r"[^A-Za-z0-9 ]", lambda match: f"\\{ord(match.group()):x} ", text)
