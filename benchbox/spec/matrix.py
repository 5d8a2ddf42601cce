"""A matrix: validated, frozen, and able to name its cells."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchbox.spec.cell import Cell, DataSpec, MeasureSpec, OptimSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from benchbox.spec.threshold import Threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One field with its values, or several fields whose values move together, as a list of partial points."""

    name: str
    points: tuple[Mapping[str, Any], ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.points[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearch:
    """A search for the largest batch that fits: the batch to begin with, and the largest one to try."""

    start: int = 1
    at_most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix file, resolved. `scalars` hold in every cell, `include` and `exclude` are partial points.

    `values` are the plain values of the file with its overrides, as a run keeps them; `policy_dirs` the folders of policies,
    those in the file included; `default_attention` the kernel of a cell that names none, by policy. With `search`, each cell
    of the axes is the beginning of a walk.
    """

    name: str
    path: Path
    scalars: Mapping[str, Any]
    axes: tuple[Axis, ...] = ()
    search: BatchSearch | None = None
    include: tuple[Mapping[str, Any], ...] = ()
    exclude: tuple[Mapping[str, Any], ...] = ()
    data: DataSpec = field(default_factory=DataSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    measure: MeasureSpec = field(default_factory=MeasureSpec)
    reference: Mapping[str, Any] = field(default_factory=dict)
    thresholds: tuple[Threshold, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    policy_dirs: tuple[Path, ...] = ()
    default_attention: Mapping[str, str] = field(default_factory=dict)

    def cells(self) -> Iterator[Cell]:
        """Yield every cell in the order of the file, the first axis slowest, then the included ones. Some may be equal."""
        yield from self.axis_cells()
        yield from (self._cell(point) for point in self.include)

    def axis_cells(self) -> Iterator[Cell]:
        """Yield the cells of the axes; without axes there are none if the cells are those of `include`."""
        if self.axes or not self.include:
            for points in itertools.product(*(axis.points for axis in self.axes)):
                cell = self._cell({key: value for point in points for key, value in point.items()})
                if not any(matches(cell, point) for point in self.exclude):
                    yield cell

    def _cell(self, point: Mapping[str, Any]) -> Cell:
        values = {**self.scalars, **point}
        if "attention" not in values and (default := self.default_attention.get(values["policy"])) is not None:
            values["attention"] = default
        return Cell(**values, data=self.data, optim=self.optim)


def matches(cell: Cell, point: Mapping[str, Any]) -> bool:
    """Return whether a cell agrees with every field of a partial point."""
    return all(getattr(cell, key) == value for key, value in point.items())


def to_yaml_word(value: Any) -> str:
    """Return a value of a cell as it is written in a matrix file."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def describe(point: Mapping[str, Any]) -> str:
    """Return a point as text: `backend=zero2 cams=4`."""
    return " ".join(f"{key}={to_yaml_word(value)}" for key, value in point.items())
