"""Short text for a list of cells: `all 4 cells`, `backend=zero2 (2 of 4 cells)`, `all but backend=single (3 of 4 cells)`."""

from __future__ import annotations

import json
import re
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from benchbox.analysis.summary import matrix_text

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from benchbox.registry.launch_record import CellDict

_PLAIN = re.compile(r"[\w.:/+-]+")

# Conditions of a clause by axis: a cell is meant if its value of every axis here is among the values.
_Clause = dict[str, tuple[str, ...]]


class CellLists:
    """Descriptions of sets of cells of one run, in the values of its axes. Cells are given by their position in `cells`."""

    def __init__(self, cells: Sequence[CellDict], axes: Sequence[str]) -> None:
        self._count = len(cells)
        self._rows = [[(axis, matrix_text(cell.get(axis))) for axis in axes] for cell in cells]
        self._masks: dict[str, dict[str, int]] = {}  # axis -> value -> the cells that have it, one bit for each position
        for index, axis in enumerate(axes):
            positions: dict[str, list[int]] = {}
            for position, row in enumerate(self._rows):
                positions.setdefault(row[index][1], []).append(position)
            self._masks[axis] = {value: _bits(members, self._count) for value, members in positions.items()}

    def text(self, positions: Collection[int]) -> str:
        """Return the cells at `positions` as clauses joined by `; `. A cell is in the list if all conditions of a clause hold.

        Nothing is lost: the clauses select these cells of the run and no others.
        """
        chosen = set(positions)
        if len(chosen) == self._count:
            return f"all {self._count} cells" if self._count > 1 else "the only cell"
        count = f"({len(chosen)} of {self._count} cells)"
        clauses = self._clauses(sorted(chosen))
        beginning = ""
        if len(clauses) > 1:
            exceptions = self._clauses([position for position in range(self._count) if position not in chosen])
            if len(exceptions) < len(clauses):
                beginning, clauses = "all but ", exceptions
        texts = "; ".join(map(self._clause_text, clauses))
        return f"{beginning}{texts} {count}"

    def _clauses(self, positions: Sequence[int]) -> list[_Clause]:
        """Cover the positions by as few clauses as a greedy search finds."""
        target = _bits(positions, self._count)
        remaining, clauses = target, []
        while remaining:
            first = (remaining & -remaining).bit_length() - 1
            clause, mask = self._widen({axis: (value,) for axis, value in self._rows[first]}, target)
            clauses.append(clause)
            remaining &= ~mask
        return clauses

    def _widen(self, clause: _Clause, target: int) -> tuple[_Clause, int]:
        """Drop conditions and add values while all selected cells are in `target`."""
        everything = (1 << self._count) - 1
        masks = {axis: self._union(axis, values) for axis, values in clause.items()}

        def selected(changed: dict[str, int]) -> int:
            mask = everything
            for axis_mask in (masks | changed).values():
                mask &= axis_mask
            return mask

        for axis in list(clause):
            if not selected({axis: everything}) & ~target:
                masks[axis] = everything
                del clause[axis]
        for axis in list(clause):
            for value, value_mask in self._masks[axis].items():
                if value not in clause[axis] and not selected({axis: masks[axis] | value_mask}) & ~target:
                    masks[axis] |= value_mask
                    clause[axis] = (*clause[axis], value)
        return clause, selected({})

    def _union(self, axis: str, values: Sequence[str]) -> int:
        return reduce(or_, (self._masks[axis][value] for value in values))

    def _clause_text(self, clause: _Clause) -> str:
        return ", ".join(self._condition(axis, values) for axis, values in clause.items())

    def _condition(self, axis: str, values: Sequence[str]) -> str:
        others = [value for value in self._masks[axis] if value not in values]
        names, other_names = ([_quoted(value) for value in part] for part in (values, others))
        if len(names) == 1:
            return f"{axis}={names[0]}"
        if len(other_names) == 1:
            return f"{axis}!={other_names[0]}"
        if len(other_names) < len(names):
            return f"{axis} not in [{', '.join(other_names)}]"
        return f"{axis} in [{', '.join(names)}]"


def _bits(positions: Sequence[int], count: int) -> int:
    """Return an integer whose bits at `positions` are set."""
    bits = bytearray(count // 8 + 1)
    for position in positions:
        bits[position // 8] |= 1 << position % 8
    return int.from_bytes(bits, "little")


def _quoted(value: str) -> str:
    """Return a value as it is, or in quotes if its characters could be taken for those of the list."""
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
