"""The invariant of `report.md`: its tables of cells and of largest batches are those that the records give.

The report is made again from the records, and its rows are compared with the printed ones. A report that other sources of
benchbox rendered may judge and word the same launches otherwise: of such a report, only figures are compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from benchbox.analysis.quantities import UNKNOWN
from benchbox.analysis.run_invariants import MadeOfRecords, RunInvariant
from benchbox.report.markdown import render_markdown
from benchbox.report.walks import BEST_HEADERS, HEADERS
from benchbox.report.write import read_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.analysis.run_check import Problem

_SECTIONS = ("## Largest batches", "## Cells")
_FIGURES = (HEADERS[1], HEADERS[5], *BEST_HEADERS[1:4], "vs reference")  # columns of batches and ratios
_FIGURE = re.compile(r"[0-9]+(?:\.[0-9]{2}x)?(?= |$)")  # a batch or a ratio, at the start of a text
_OF_PREDICTIONS = "predicted "  # start of columns that are not made of records: cells may be predicted after the report
_SEPARATOR = re.compile(r"(?<!\\) \| ")
_LEFT_OUT = re.compile(r"([0-9]+) more: ")  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrintedTable:
    """A table of a Markdown report. Texts are escaped."""

    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)  # number of rows, where some were left out

    @property
    def length(self) -> int:
        return len(self.rows) + sum(self.left_out)


class _PrintedTables(MadeOfRecords):
    names = ("report.md",)

    def finish(self) -> Iterator[Problem]:
        self.applies = bool(self.current())
        if not self.applies:
            return
        printed = (self.store.path / "report.md").read_text(encoding="utf-8")
        expected = render_markdown(read_report(self.store, self.store.records()))
        is_same = _last_line(printed) == _last_line(expected)  # which names the sources of benchbox
        printed_tables, expected_tables = _tables(printed), _tables(expected)
        for section in _SECTIONS:
            differences = _differences if is_same else _different_figures
            for text in differences(printed_tables[section], expected_tables[section]):
                yield None, f"report.md: {section.removeprefix('## ')}: {text}"


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def _tables(text: str) -> dict[str, list[_PrintedTable]]:
    """Return the tables of a Markdown report by section."""
    tables: dict[str, list[_PrintedTable]] = defaultdict(list)
    section, previous, table = "", "", None
    for line in text.splitlines():
        if line.startswith("## "):
            section, table = line, None
        elif line.startswith("|---"):
            table = _PrintedTable(headers=_texts(previous))
            tables[section].append(table)
        elif table is not None and line.startswith("|"):
            table.rows.append(_texts(line))
        elif table is not None and line:  # below the table
            table.left_out.extend(int(number) for number in _LEFT_OUT.findall(line)[:1])
            table = None
        previous = line
    return tables


def _texts(line: str) -> list[str]:
    return _SEPARATOR.split(line.removeprefix("| ").removesuffix(" |"))


def _differences(printed: Sequence[_PrintedTable], expected: Sequence[_PrintedTable]) -> Iterator[str]:
    """Yield how the tables of a section differ from those that the same sources give."""
    if len(printed) != len(expected):
        yield f"the number of tables is {len(printed)}, the records give {len(expected)}"
    for table, other in zip(printed, expected, strict=False):
        if table.length != other.length:
            yield f"the number of rows is {table.length}, the records give {other.length}"
            continue
        columns = [header for header in other.headers if header in table.headers and not header.startswith(_OF_PREDICTIONS)]
        for number, (row, expected_row) in enumerate(zip(table.rows, other.rows, strict=False), 1):
            for header in columns:
                text, expected_text = row[table.headers.index(header)], expected_row[other.headers.index(header)]
                if text != expected_text:
                    yield f"row {number}: {header} is {text}, the records give {expected_text}"


def _different_figures(printed: Sequence[_PrintedTable], expected: Sequence[_PrintedTable]) -> Iterator[str]:
    """Yield how batches and ratios in the tables of a section differ from those that the records give by other rules.

    Such rules may refuse other ratios at the fastest batches: those that both give are compared.
    """
    if expected and not printed:
        yield "no table"
    for table, other in zip(printed, expected, strict=False):
        figures, other_figures = _figures(table), _figures(other)
        if BEST_HEADERS[3] in other.headers:
            setups = _compared_setups(table, figures) & _compared_setups(other, other_figures)
            figures, other_figures = _only(figures, table, setups), _only(other_figures, other, setups)
        yield from _differences([figures], [other_figures])


def _figures(table: _PrintedTable) -> _PrintedTable:
    """Return the columns of batches and ratios, with nothing but the figure of each text."""
    columns = [column for column, header in enumerate(table.headers) if header in _FIGURES]
    matches = [[_FIGURE.match(row[column]) for column in columns] for row in table.rows]
    rows = [[match[0] if match else UNKNOWN for match in row] for row in matches]
    return replace(table, headers=[table.headers[column] for column in columns], rows=rows)


def _compared_setups(table: _PrintedTable, figures: _PrintedTable) -> set[str]:
    return {row[0] for row, texts in zip(table.rows, figures.rows, strict=True) if texts[-1] != UNKNOWN}


def _only(figures: _PrintedTable, table: _PrintedTable, setups: set[str]) -> _PrintedTable:
    rows = [texts for row, texts in zip(table.rows, figures.rows, strict=True) if row[0] in setups]
    return replace(figures, rows=rows, left_out=[])


REPORT_INVARIANTS = (RunInvariant("tables of the report follow from the records", _PrintedTables),)
