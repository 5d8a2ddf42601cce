"""Events of a rank: its progress at every stage and step (heartbeats add the phases), and the error that ended it."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, NotRequired, TypedDict

from benchbox.errors import BenchboxError, CheckpointError

if TYPE_CHECKING:
    from benchbox.measure.phases import ProgressTracker
    from benchbox.registry.phases import RankState
    from benchbox.store.events import EventWriter


_IN_GLOO = re.compile(r"\[\S*/gloo/\S+:\d+\] ")


class ErrorEvent(TypedDict):
    """Fields of an `error` event."""

    status: str  # of the launch, if this error is its root cause
    type: str  # class name of the exception
    message: str
    stage: str
    step: int | None
    phase: str | None
    traceback: str
    operation: str | None  # that needed the memory, where the error names it
    secondary: bool  # raised by a collective that broke, as happens when another rank failed
    rank: NotRequired[int]  # that is at fault, where the error says which


class Reporter:
    """Updates the tracked state and writes the events of a rank."""

    def __init__(self, tracker: ProgressTracker, events: EventWriter) -> None:
        self._tracker = tracker
        self._events = events

    def enter_stage(self, stage: str, total_steps: int | None = None) -> None:
        """Enter a stage of `total_steps` steps and report it."""
        self._tracker.enter(stage, total_steps)
        self.report_progress()

    def report_progress(self) -> None:
        """Write the current state as a `progress` event. To be called after each step, outside of what is timed."""
        stage, step, of, phase, _ = self._tracker.state
        self._events.write("progress", stage=stage, step=step, of=of, phase=phase)


def describe_error(error: BaseException, state: RankState) -> ErrorEvent:
    """Describe an exception that is being handled.

    Its status depends on its class, and on its text only for the errors listed in `benchbox.worker.out_of_memory`.
    """
    import torch.distributed as dist

    from benchbox.worker.out_of_memory import is_out_of_memory

    if is_out_of_memory(error):
        status = "oom"
    elif isinstance(error, BenchboxError):
        status = error.status
    elif isinstance(error, KeyboardInterrupt):
        status = "interrupted"
    else:
        status = "crash"
    event: ErrorEvent = {
        "status": status,
        "type": type(error).__name__,
        "message": _printable(str(error)),
        "stage": state.stage,
        "step": state.step,
        "phase": state.phase,
        "traceback": _printable(traceback.format_exc()),
        "operation": getattr(error, "operation", None),
        "secondary": status == "crash" and (isinstance(error, dist.DistError) or _is_of_gloo(error)),
    }
    if isinstance(error, CheckpointError) and error.rank is not None:
        event["rank"] = error.rank
    return event


def _is_of_gloo(error: BaseException) -> bool:
    """Return whether a collective of gloo has failed, which has no class of its own: its text begins with the line in gloo."""
    return type(error) is RuntimeError and _IN_GLOO.match(str(error)) is not None


def _printable(text: str) -> str:
    """Return a text with escapes for what is no character: Python keeps the bytes of paths that are not UTF-8 as such."""
    return text.encode(errors="backslashreplace").decode()
