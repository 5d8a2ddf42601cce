"""Progress of a training: a live display on a terminal, and plain lines in logs."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from benchbox.launch.progress import format_clock
from benchbox.launch.supervise.trace import furthest_behind
from benchbox.registry.phases import STAGE_TEXTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from benchbox.launch.restarts import Restart
    from benchbox.launch.supervise.trace import Trace
    from benchbox.spec.train import TrainConfig

# Fields of a row that have a place of their own in the display; numbers besides them are parts of the loss.
_OTHER_FIELDS = frozenset(
    {
        *("step", "loss", "grad_norm", "lr", "samples", "step_s", "epoch", "data_wait_s", "mfu", "mfu_reason", "warning"),
        *("allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes"),
    }
)
_AUDIT_SEVERITIES = ("error", "unknown", "warning")


class TrainingProgress:
    """Progress of a training on a console.

    A terminal shows the latest step, its loss with its parts, speed, waiting, memory and the remaining time. Elsewhere a line
    is printed every `log_every` steps and for the last one. Findings and warnings are lines everywhere.
    """

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._stage = "starting"
        self._row: Mapping[str, Any] | None = None
        self._mfu_reason: str | None = None
        self._warnings: set[str] = set()  # of ranks, which warn again after a restart

    @contextmanager
    def display(self) -> Iterator[None]:
        """Open around the training."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True):
            yield

    def ranks_progressed(self, traces: Sequence[Trace]) -> None:
        """Show the state of the rank furthest behind until the first step is logged, and what ranks warn of, once."""
        for text in (text for trace in traces for text in trace.warnings):
            if text not in self._warnings:
                self._warnings.add(text)
                self.warn(text)
        slowest = furthest_behind(traces)
        state = str(slowest) if slowest else "starting"
        if slowest and slowest.stage in STAGE_TEXTS and state != self._stage:
            self._print(state)
        self._stage = state

    def metrics_row(self, row: Mapping[str, Any]) -> None:
        """Show a row of `metrics.jsonl`."""
        config, step = self._config, int(row["step"]) + 1
        if self._row is None:
            self._print(config.cell.data.reading)
        self._row = row
        self._mfu_reason = row.get("mfu_reason", self._mfu_reason)
        if "warning" in row:
            self.warn(row["warning"])
        if not self._console.is_terminal and (step % config.log_every == 0 or step == config.steps):
            self._print(self._plain_line(row))

    def audit_row(self, row: Mapping[str, Any]) -> None:
        """Show an audit, a row of `findings.jsonl`: a line for each finding, or one that there are none."""
        shown = [finding for finding in row["findings"] if finding["severity"] in _AUDIT_SEVERITIES]
        edq = row["numbers"].get("edq")
        problems = row.get("problems", ())
        for problem in problems:
            self.warn(
                f"the observer failed on {problem}: nothing was judged after that", title=f"audit after step {row['step']}"
            )
        if row.get("skipped"):
            self._print(f"audit after step {row['step']}: not judged, all observed steps were skipped")
        elif not shown and not problems:
            quality = "" if edq is None else f", effective descent quality {edq:.4f}"
            self._print(f"audit after step {row['step']}: no errors or warnings{quality}")
        for finding in shown:
            where = f"{finding['where']}: " if finding["where"] else ""
            text = f"{finding['severity']} {finding['code']} {where}{finding['title']}; {finding['repair']}"
            self.warn(text, title=f"audit after step {row['step']}")

    def validation_row(self, row: Mapping[str, Any]) -> None:
        """Show a validation, a row of `validation.jsonl`."""
        terms = "  ".join(f"{name} {_text(value, '.4f')}" for name, value in row["terms"].items())
        count = f"{row['samples']:,} samples in {row['seconds']:.1f} s"
        averages = " of averages" if row.get("evaluated_weights") == "averages" else ""
        self._print(f"validation{averages} after {row['step']} steps: loss {_text(row['loss'], '.4f')}  {terms}  {count}")

    def restarted(self, restart: Restart) -> None:
        """Show that the ranks are started again, and why."""
        origin = (
            f"the checkpoint at step {restart.from_step}" if restart.from_step else "the beginning, as there is no checkpoint"
        )
        self.warn(f"{restart.reason}; restart {restart.number} of {restart.limit} from {origin}")

    def message(self, line: str) -> None:
        """Show a line, such as what a resumed training changes."""
        self._print(line)

    def stop_requested(self, signal: str) -> None:
        """Show that a signal ends the training after a step."""
        saved = "with a checkpoint" if self._config.checkpoint.every else "without a checkpoint (checkpoint.every is 0)"
        self.warn(f"{signal}: the training stops after this step {saved}; a second signal ends it at once", title="")

    def _plain_line(self, row: Mapping[str, Any]) -> str:
        step, steps, remaining_s = int(row["step"]) + 1, self._config.steps, self._remaining_s(row)
        return (
            f"step {step}/{steps}  loss {_text(row['loss'], '.4f')}  grad norm {_text(row['grad_norm'], '.3f')}"
            f"  lr {row['lr']:.2e}"
            f"  {row['samples'] / row['step_s']:.3g} samples/s"
            + ("  skipped" if row.get("skipped") else "")
            + (f"  {format_clock(remaining_s)} left" if remaining_s >= 1 else "")
        )

    def _remaining_s(self, row: Mapping[str, Any]) -> float:
        return float((self._config.steps - int(row["step"]) - 1) * row["step_s"])

    def _render(self) -> Table:
        table = Table.grid()
        if self._row is None:
            table.add_row(Text(f"{self._config.name}  {self._stage}", overflow="ellipsis", no_wrap=True))
            return table
        row, steps = self._row, self._config.steps
        step, remaining_s = int(row["step"]) + 1, self._remaining_s(row)
        head = f"step {step}/{steps}"
        if row.get("epoch") is not None:
            head += f"  epoch {row['epoch']:.2f}"
        if remaining_s >= 1:
            head += f"  {format_clock(remaining_s)} left"
        top = Table.grid(padding=(0, 2))
        top.add_row(ProgressBar(total=steps, completed=step, width=24), Text(head))
        table.add_row(top)
        for line in (_loss_line(row), _speed_line(row, self._mfu_reason)):
            table.add_row(Text(line, overflow="ellipsis", no_wrap=True))
        return table

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str, *, title: str = "warning") -> None:
        """Print a line on stderr, or above the live display."""
        line = f"{title}: {text}" if title else text
        if self._console.is_terminal:
            self._print(line)
        else:
            print(line, file=sys.stderr, flush=True)


def _loss_line(row: Mapping[str, Any]) -> str:
    parts = [f"{name} {value:.4g}" for name, value in row.items() if name not in _OTHER_FIELDS and isinstance(value, float)]
    losses = f"loss {_text(row['loss'], '.4f')}" + (f" ({', '.join(parts)})" if parts else "")
    return f"{losses}  grad norm {_text(row['grad_norm'], '.3f')}  lr {row['lr']:.2e}"


def _text(value: float | None, spec: str) -> str:
    """Return a number of a row as text. One that is not finite is null there."""
    return "not finite" if value is None else format(value, spec)


def _speed_line(row: Mapping[str, Any], mfu_reason: str | None) -> str:
    line = f"{row['samples'] / row['step_s']:.3g} samples/s"
    if row.get("data_wait_s") is not None:
        line += f"  data wait {min(1.0, row['data_wait_s'] / row['step_s']):.0%}"
    if row.get("allocated_peak_bytes") is not None:
        line += f"  peak memory {row['allocated_peak_bytes'] / 2**30:.2f} GiB"
    elif row.get("host_rss_bytes") is not None:
        line += f"  host memory {row['host_rss_bytes'] / 2**30:.2f} GiB"
    if row.get("mfu") is not None:
        return f"{line}  MFU {row['mfu']:.1%}"
    return f"{line}  MFU unknown: {mfu_reason}" if mfu_reason else line
