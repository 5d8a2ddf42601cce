"""Showing a run while it runs: a live display on a terminal, and in any case one plain line for every launch that ended."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from rich.console import Console

    from benchbox.launch.resume import Launches
    from benchbox.launch.supervise.trace import Trace
    from benchbox.spec.cell import Cell


class Progress(Protocol):
    """Who is told what a run does."""

    def running(self, planned: Launches, left: Launches, notes: Sequence[str]) -> AbstractContextManager[None]:
        """Open around the run: what was planned, what of it is left to do, and why some of that is done again."""

    def began(self, cell: Cell, launch: int) -> None: ...

    def moved(self, traces: Sequence[Trace]) -> None: ...

    def ended(self, record: Mapping[str, Any]) -> None: ...

    def spared(self, cell: Cell, launch: int, status: str) -> None:
        """A launch is not run, because an earlier one of its cell ended in a way it would end too."""


class ConsoleProgress(Progress):
    """Progress on a console. `label` names a cell in one line."""

    def __init__(self, console: Console, label: Callable[[Cell], str]) -> None:
        self._console = console
        self._label = label
        self._total = self._done = self._failed = self._cells = 0
        self._left_of_cell: Counter[str] = Counter()
        self._current = ""
        self._place = ""
        self._began = 0.0
        self._durations: list[float] = []

    @contextmanager
    def running(self, planned: Launches, left: Launches, notes: Sequence[str]) -> Iterator[None]:
        self._total = len(planned)
        self._done = len(planned) - len(left)
        self._cells = len({cell.cell_id for cell, _ in planned})
        self._left_of_cell = Counter(cell.cell_id for cell, _ in left)
        if self._done:
            self._say(f"{self._done} of {self._total} launches are done already")
        for note in notes:
            self._say(note)
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._display, console=self._console, refresh_per_second=4, transient=True):
            yield

    def began(self, cell: Cell, launch: int) -> None:
        self._current = f"{self._label(cell)} #{launch}"
        self._place = "starting"
        self._began = time.monotonic()

    def moved(self, traces: Sequence[Trace]) -> None:
        behind = min((trace.state for trace in traces if trace.state), key=lambda state: state.order, default=None)
        self._place = str(behind) if behind else "starting"

    def ended(self, record: Mapping[str, Any]) -> None:
        self._count(record["cell_id"])
        self._durations.append(record["duration_s"])
        self._failed += record["status"] != "ok"
        self._say(f"[{self._done}/{self._total}] {self._current} {outcome_line(record)}")
        self._current = self._place = ""

    def spared(self, cell: Cell, launch: int, status: str) -> None:
        self._count(cell.cell_id)
        self._say(f"[{self._done}/{self._total}] {self._label(cell)} #{launch} not run: it would end {status} too")

    def _count(self, cell_id: str) -> None:
        self._done += 1
        self._left_of_cell[cell_id] -= 1

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _display(self) -> Table:
        cells = self._cells - sum(count > 0 for count in self._left_of_cell.values())
        numbers = f"{self._done}/{self._total} launches  {cells}/{self._cells} cells"
        if self._failed:
            numbers += f"  {self._failed} failed"
        if self._durations and (remaining_s := self._remaining_s()) >= 1:
            numbers += f"  about {_clock(remaining_s)} left"
        head = Table.grid(padding=(0, 2))
        head.add_row(ProgressBar(total=self._total, completed=self._done, width=24), Text(numbers))
        display = Table.grid()
        display.add_row(head)
        if self._current:
            elapsed = _clock(time.monotonic() - self._began)
            display.add_row(Text(f"{self._current}  {self._place}  {elapsed}", overflow="ellipsis", no_wrap=True))
        return display

    def _remaining_s(self) -> float:
        """By the mean of the launches that have ended, less what the current one has already taken."""
        mean = sum(self._durations) / len(self._durations)
        current = min(mean, time.monotonic() - self._began) if self._current else 0.0
        return mean * (self._total - self._done) - current


def outcome_line(record: Mapping[str, Any]) -> str:
    """How a launch ended: throughput and duration when it is ok, else who failed, where, and of what."""
    duration = f"{record['duration_s']:.1f} s"
    if record["status"] == "ok":
        return f"ok {record['throughput']['global_samples_per_s']:.3g} samples/s {duration}"
    error = record["error"] or {}
    who = f"rank {error['rank']}" if error.get("rank") is not None else ""
    where = ", ".join(part for part in (who, error.get("phase") or error.get("stage")) if part)
    what = f"{error.get('type')}: {next(iter(str(error.get('message')).splitlines()), '')}"
    return f"{record['status']} {duration} ({where}) {what}" if where else f"{record['status']} {duration} {what}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
