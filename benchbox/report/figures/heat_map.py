"""Throughput of many cells as a map: policy or backend against all other fields."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchbox.analysis.quantities import significant
from benchbox.analysis.summary import matrix_text
from benchbox.report.figures.cells import row_heading, row_name, throughput
from benchbox.report.figures.drawing import Drawing, name_rows, new_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from matplotlib.figure import Figure

    from benchbox.analysis.summary import CellSummary
    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Palette

KEY = "heat_map"
MIN_CELLS = 41
COLUMN_FIELDS = ("backend", "batch", "recipe", "policy")
MAX_ROWS, MAX_COLUMNS = 120, 16


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield the figure of a run with more than 40 cells that vary in two fields at least."""
    across = next((field for field in COLUMN_FIELDS if field in cells.axes), None)
    down = [field for field in cells.axes if across is not None and not _follows(cells.summaries, field, across)]
    if len(cells.summaries) < MIN_CELLS or across is None or not down:
        return
    table: dict[str, dict[str, CellSummary]] = {}
    for summary in cells.summaries:
        table.setdefault(row_name(summary, down), {})[row_name(summary, [across])] = summary
    columns = list(dict.fromkeys(name for row in table.values() for name in row))
    if len(table) > MAX_ROWS or len(columns) > MAX_COLUMNS:
        return
    yield Drawing(
        key=KEY,
        title=f"Samples/s by {across}, relative to the fastest of each row",
        description="The stronger the colour, the faster; numbers are samples/s. Hatched fields with a word did not end ok, "
        "empty ones were not planned. The table of cells has the same numbers.",
        draw=partial(_draw, row_heading(down), table, columns),
    )


def _follows(summaries: Sequence[CellSummary], field: str, across: str) -> bool:
    """Return whether every value of `across` has one value of the field, as a backend may have one number of ranks."""
    pairs = {(matrix_text(summary.cell.get(across)), matrix_text(summary.cell.get(field))) for summary in summaries}
    return len(pairs) == len({value for value, _ in pairs})


def _draw(heading: str, table: Mapping[str, Mapping[str, CellSummary]], columns: Sequence[str], palette: Palette) -> Figure:
    from matplotlib.patches import Rectangle

    figure, (panel,) = new_figure(palette, size=(10.4, 1.4 + 0.22 * len(table)))
    panel.grid(visible=False)
    for row, cells in enumerate(table.values()):
        best = max((speed for cell in cells.values() if (speed := throughput(cell))), default=1.0)
        for column, name in enumerate(columns):
            if name not in cells:
                continue
            summary, speed = cells[name], throughput(cells[name])
            corner = (column - 0.5, row - 0.5)
            if speed is None or summary.status != "ok":
                panel.add_patch(Rectangle(corner, 1, 1, facecolor="none", edgecolor=palette.bad, hatch="////", linewidth=0.3))
                text = summary.status
            else:
                panel.add_patch(Rectangle(corner, 1, 1, facecolor=palette.accent, alpha=0.06 + 0.5 * speed / best, linewidth=0))
                text = significant(speed)
            panel.text(column, row, text, ha="center", va="center", fontsize=7.5, color=palette.ink)
    panel.set_xlim(-0.5, len(columns) - 0.5)
    panel.set_xticks(range(len(columns)), columns, fontsize=8)
    panel.xaxis.tick_top()
    name_rows(figure, panel, palette, heading, list(table))
    panel.spines[["left", "bottom"]].set_visible(False)
    return figure
