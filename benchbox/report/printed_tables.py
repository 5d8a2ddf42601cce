"""The invariant of `report.md`: its tables of cells and of largest batches are those that the records give.

These tables are made again from the records, and their rows are compared with the printed ones. A report that other sources of
benchbox rendered may judge and word the same launches otherwise: of such a report, only figures are compared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from benchbox.analysis.quantities import UNKNOWN
from benchbox.analysis.run_invariants import MadeOfRecords, RunInvariant
from benchbox.analysis.summary import summarize
from benchbox.report.audit.recorded_facts import FACTS_INVARIANT
from benchbox.report.markdown import render_tables, sources_line
from benchbox.report.view import build_tables
from benchbox.report.walks import BEST_HEADERS, HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchbox.analysis.run_check import Problem

_SECTIONS = ("## Largest batches", "## Cells")
_SETUP = HEADERS[0]  # column that names the rows
_FIGURES = (HEADERS[1], HEADERS[5], *BEST_HEADERS[1:4], "vs reference")  # columns of batches and ratios
_FIGURE = re.compile(r"[0-9]+(?:\.[0-9]{2}x)?(?= |$)")  # a batch or a ratio, at the start of a text
_OF_PREDICTIONS = "predicted "  # start of columns that are not made of records: cells may be predicted after the report
_SEPARATOR = " | "  # a bar within a text is escaped
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
        run = self.store.run()
        expected = render_tables(*build_tables(run, summarize(run, self.store.records())))
        differences = _differences if printed.rstrip().endswith(f"\n{sources_line()}") else _different_figures
        printed_tables, expected_tables = _tables(printed), _tables(expected)
        for section in _SECTIONS:
            for text in _of_section(printed_tables[section], expected_tables[section], differences):
                yield None, f"report.md: {section.removeprefix('## ')}: {text}"


def _of_section(
    printed: Sequence[_PrintedTable],
    expected: Sequence[_PrintedTable],
    differences: Callable[[_PrintedTable, _PrintedTable], Iterable[str]],
) -> Iterator[str]:
    if len(printed) != len(expected):
        yield f"the number of tables is {len(printed)}, the records give {len(expected)}"
    for pair in zip(printed, expected, strict=False):
        yield from differences(*pair)


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
    return line.removeprefix("| ").removesuffix(" |").split(_SEPARATOR)


def _differences(table: _PrintedTable, expected: _PrintedTable) -> Iterator[str]:
    """Yield how a table differs from the one that the same sources give."""
    if problems := _different_form(table, expected, lambda header: not header.startswith(_OF_PREDICTIONS)):
        yield from problems
    else:
        yield from _different_texts(table, expected)


def _different_figures(table: _PrintedTable, expected: _PrintedTable) -> Iterator[str]:
    """Yield how batches and ratios in a table differ from those that the records give by other rules.

    Such rules may refuse other ratios at the fastest batches: those that both give are compared.
    """
    if problems := _different_form(table, expected, lambda header: header in (_SETUP, *_FIGURES)):
        yield from problems
        return
    figures, expected_figures = _figures(table), _figures(expected)
    if BEST_HEADERS[3] in expected.headers:
        setups = _compared_setups(table, figures) & _compared_setups(expected, expected_figures)
        figures, expected_figures = _only(figures, table, setups), _only(expected_figures, expected, setups)
    yield from _different_texts(figures, expected_figures)


def _different_form(table: _PrintedTable, expected: _PrintedTable, is_compared: Callable[[str], bool]) -> list[str]:
    """Return how the compared columns and the number of rows differ, and which rows have more or fewer texts than columns."""
    headers, expected_headers = (Counter(filter(is_compared, entry.headers)) for entry in (table, expected))
    problems = [f"column {header} is missing" for header in (expected_headers - headers).elements()]
    problems += [f"column {header} is added" for header in (headers - expected_headers).elements()]
    problems += [
        f"row {number} has {len(row)} texts for {len(table.headers)} columns"
        for number, row in enumerate(table.rows, 1)
        if len(row) != len(table.headers)
    ]
    if table.length != expected.length:
        problems.append(f"the number of rows is {table.length}, the records give {expected.length}")
    return problems


def _different_texts(table: _PrintedTable, expected: _PrintedTable) -> Iterator[str]:
    columns = [header for header in expected.headers if header in table.headers and not header.startswith(_OF_PREDICTIONS)]
    for number, (row, expected_row) in enumerate(zip(table.rows, expected.rows, strict=False), 1):
        for header in columns:
            text, expected_text = row[table.headers.index(header)], expected_row[expected.headers.index(header)]
            if text != expected_text:
                yield f"row {number}: {header} is {text}, the records give {expected_text}"


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


REPORT_INVARIANTS = (RunInvariant("tables of the report follow from the records", _PrintedTables), FACTS_INVARIANT)
