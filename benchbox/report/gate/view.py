"""The texts and positions that all formats of a gate share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchbox.analysis.gate import EXCUSED, verdict_of
from benchbox.errors import ConfigurationError
from benchbox.spec.source import read_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from benchbox.analysis.gate import GateRow
    from benchbox.analysis.regression import DemandVerdict
    from benchbox.store.noise import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class GateView:
    """Rows of a gate on a run or on benchmarks, with the file that its thresholds are written in, if it is here."""

    path: str  # of the run, as the user names it
    rows: Sequence[GateRow]
    file: str | None = None
    lines: Mapping[int, int] = field(default_factory=dict)  # line of a threshold in that file, by its index
    notes: Sequence[str] = ()  # about the machine
    noise: Noise | None = None

    @property
    def verdict(self) -> DemandVerdict:
        return verdict_of(self.rows)

    @property
    def noted(self) -> list[GateRow]:
        """Rows that did not simply pass."""
        return [row for row in self.rows if row.verdict != "ok"]

    @property
    def failing(self) -> list[GateRow]:
        return [row for row in self.noted if row.verdict not in EXCUSED]

    def position(self, row: GateRow) -> tuple[str | None, int | None]:
        """Return file and line of the demand of a row: its threshold, else the first line of the file; None where unknown."""
        if row.file is not None:
            return row.file, None
        return self.file, None if self.file is None else self.lines.get(-1 if row.threshold is None else row.threshold, 1)

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        counts = Counter(row.verdict for row in self.rows)
        numbers = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        return f"benchbox check {self.path}: {self.verdict} ({numbers or 'no cells'})"


def row_sentence(row: GateRow) -> str:
    """Return a row in one sentence that stands alone."""
    note = f": {row.note}" if row.note else ""
    return f"{row.cell}: {row.metric} is {row.actual}, expected {row.expected}: {row.verdict}{note}"


def threshold_lines(path: Path, thresholds: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the line of every threshold in its file, by index; empty if the file has changed since it was run.

    The key -1 has the line of the axes, which demands on the status of a cell are about.
    """
    try:
        source = read_source(path)
    except ConfigurationError:
        return {}
    if [source.at(("thresholds", index, "metric")) for index in range(len(thresholds))] != [
        threshold["metric"] for threshold in thresholds
    ]:
        return {}
    positions = {index: source.where(("thresholds", index)) for index in range(len(thresholds))}
    positions[-1] = source.where(("axes",), key=True)
    return {index: int(position.rsplit(":", 2)[-2]) for index, position in positions.items() if position.count(":") >= 2}
