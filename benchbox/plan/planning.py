"""Plan of a run: the cells of a matrix that can run, in order, and the reasons why others cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchbox.plan.only import select
from benchbox.registry.refusals import cell_refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.spec.matrix import Matrix


@dataclass(frozen=True, slots=True)
class Skip:
    """A cell that will not run, and why."""

    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells to run in order, all different, and the skipped ones.

    `walks` are the cells that begin a walk to the largest batch that fits; the others are launched as they are.
    """

    cells: tuple[Cell, ...]
    skipped: tuple[Skip, ...]
    walks: tuple[Cell, ...] = ()


def plan(matrix: Matrix, only: str = "") -> Plan:
    """Return the cells of a matrix that can run, in the order of the file. `only` selects among them (see `plan.only`).

    Raises:
        ConfigurationError: `only` is not an expression, or selects nothing.
    """
    cells: dict[str, Cell] = {}
    skipped: list[Skip] = []
    walked = set(matrix.axis_cells()) if matrix.search else set()
    for cell in select(only, matrix.cells()):
        refusal = cell_refusal(cell)
        if refusal:
            skipped.append(Skip(cell, refusal))
        elif matrix.search and cell not in walked and replace(cell, batch=matrix.search.start) in walked:
            skipped.append(Skip(cell, "the search along the axis batch chooses the batches of this set-up"))
        elif cells.setdefault(cell.cell_id, cell) is not cell:
            skipped.append(Skip(cell, "the matrix has this cell already"))
    return Plan(tuple(cells.values()), tuple(skipped), tuple(cell for cell in cells.values() if cell in walked))


def launches(planned: Plan, measure: MeasureSpec) -> list[tuple[Cell, int]]:
    """Return every launch as (cell, number from 1), round by round.

    The launches of walks are not among them: each depends on those before it.
    """
    walks = set(planned.walks)
    cells = [cell for cell in planned.cells if cell not in walks]
    return rounds(cells, range(1, measure.launches + 1))


def rounds(cells: Sequence[Cell], numbers: Iterable[int]) -> list[tuple[Cell, int]]:
    """Return the launches of these numbers: one of every cell, then another of every cell, in the opposite order, and so on.

    Interleaved, so that a machine that slows down over an hour slows every cell and not only the last ones. In turns there and
    back, because within every round the later cells would be slowed more.
    """
    return [(cell, number) for number in numbers for cell in (cells if number % 2 else reversed(cells))]
