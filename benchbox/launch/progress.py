"""Progress of a run: a live display on a terminal, and everywhere one plain line for every launch that ended."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from benchbox.launch.supervise.trace import furthest_behind
from benchbox.registry.host_load import busy_reasons
from benchbox.registry.phases import STAGE_TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from rich.console import Console

    from benchbox.launch.resume import Launches
    from benchbox.launch.supervise.trace import Trace
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.spec.cell import Cell


_LAUNCHES_BETWEEN_CLOCKS = 100  # without a terminal, which shows the remaining time all along


class Progress(Protocol):
    """Receiver of the events of a run."""

    def display(self, planned: Launches, pending: Launches, notes: Sequence[str]) -> AbstractContextManager[None]:
        """Open around the run, with the planned launches, the pending ones among them, and why some of those are repeated."""

    def launch_started(self, cell: Cell, launch: int) -> None: ...

    def ranks_progressed(self, traces: Sequence[Trace]) -> None: ...

    def launch_ended(self, record: LaunchRecord) -> None: ...

    def launch_skipped(self, cell: Cell, launch: int, status: str) -> None:
        """Note a launch that is not run, because an earlier one of its cell ended with a non-retryable status."""


class ConsoleProgress(Progress):
    """Progress on a console. `label` names a cell in one line."""

    def __init__(self, console: Console, label: Callable[[Cell], str]) -> None:
        self._console = console
        self._label = label
        self._total = self._done = self._failed = self._cells = 0
        self._pending_of_cell: Counter[str] = Counter()
        self._current = ""  # label of the running launch
        self._rank_state = ""  # of the rank furthest behind
        self._started_at = 0.0
        self._durations: list[float] = []

    @contextmanager
    def display(self, planned: Launches, pending: Launches, notes: Sequence[str]) -> Iterator[None]:
        self._total = len(planned)
        self._done = len(planned) - len(pending)
        self._cells = len({cell.cell_id for cell, _ in planned})
        self._pending_of_cell = Counter(cell.cell_id for cell, _ in pending)
        if self._done:
            self._print(f"{self._done} of {self._total} launches are done already")
        for note in notes:
            self._print(note)
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True):
            yield

    def launch_started(self, cell: Cell, launch: int) -> None:
        self._current = f"{self._label(cell)} #{launch}"
        self._rank_state = "starting"
        self._started_at = time.monotonic()

    def ranks_progressed(self, traces: Sequence[Trace]) -> None:
        slowest = furthest_behind(traces)
        state = str(slowest) if slowest else "starting"
        if slowest and slowest.stage in STAGE_TEXTS and state != self._rank_state:
            self._print(f"{self._current}: {state}")
        self._rank_state = state

    def launch_ended(self, record: LaunchRecord) -> None:
        self._count(record["cell_id"])
        self._durations.append(record["duration_s"])
        self._failed += record["status"] != "ok"
        self._print(f"[{self._done}/{self._total}] {self._current} {outcome_line(record)}")
        if self._done % _LAUNCHES_BETWEEN_CLOCKS == 0 and self._done < self._total and not self._console.is_terminal:
            self._print(f"about {format_clock(self._remaining_s())} left")
        for reason in busy_reasons(record):
            self._print(f"warning: busy host during this launch: {reason}")
        self._current = self._rank_state = ""

    def launch_skipped(self, cell: Cell, launch: int, status: str) -> None:
        self._count(cell.cell_id)
        self._print(f"[{self._done}/{self._total}] {self._label(cell)} #{launch} not run: it would end {status} too")

    def _count(self, cell_id: str) -> None:
        self._done += 1
        self._pending_of_cell[cell_id] -= 1

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Table:
        cells_done = self._cells - sum(count > 0 for count in self._pending_of_cell.values())
        numbers = f"{self._done}/{self._total} launches  {cells_done}/{self._cells} cells"
        if self._failed:
            numbers += f"  {self._failed} failed"
        if self._durations and (remaining_s := self._remaining_s()) >= 1:
            numbers += f"  about {format_clock(remaining_s)} left"
        head = Table.grid(padding=(0, 2))
        head.add_row(ProgressBar(total=self._total, completed=self._done, width=24), Text(numbers))
        table = Table.grid()
        table.add_row(head)
        if self._current:
            elapsed = format_clock(time.monotonic() - self._started_at)
            table.add_row(Text(f"{self._current}  {self._rank_state}  {elapsed}", overflow="ellipsis", no_wrap=True))
        return table

    def _remaining_s(self) -> float:
        """Estimate the remaining time from the mean duration of ended launches, less the time of the running one."""
        mean = sum(self._durations) / len(self._durations)
        elapsed = min(mean, time.monotonic() - self._started_at) if self._current else 0.0
        return mean * (self._total - self._done) - elapsed


def outcome_line(record: LaunchRecord) -> str:
    """Return one line on an ended launch: throughput and duration when it is ok, else the error with its rank and phase."""
    duration = f"{record['duration_s']:.1f} s"
    if record["status"] == "ok" and record["throughput"]:
        return f"ok {record['throughput']['global_samples_per_s']:.3g} samples/s {duration}"
    error = record["error"]
    if error is None:
        return f"{record['status']} {duration}"
    rank = f"rank {error['rank']}" if error["rank"] is not None else ""
    location = ", ".join(part for part in (rank, error["phase"] or error.get("stage")) if part)
    cause = f"{error['type']}: {next(iter(error['message'].splitlines()), '')}"
    return f"{record['status']} {duration} ({location}) {cause}" if location else f"{record['status']} {duration} {cause}"


def format_clock(seconds: float) -> str:
    """Format a duration as `m:ss` or `h:mm:ss`."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remaining_seconds:02}" if hours else f"{minutes}:{remaining_seconds:02}"
