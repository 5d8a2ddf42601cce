"""Instruments of a step: the step opens phases, instruments time or report them.

The step opens `step()` once and `phase(name)` around each of its parts. It does not know which instrument is passed to it; the
null instrument does nothing.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchbox.registry.phases import COMPILATION, RankState
from benchbox.registry.phases import PHASES as PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType


class Instrument(Protocol):
    """Receiver of the phases of a step. Phases never nest; a phase that occurs again in a step (accumulation) adds up."""

    def step(self) -> AbstractContextManager[None]:
        """Return the context of one complete optimizer step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context of one phase, whose name is one of `PHASES`."""


class ContextInstrument:
    """Instrument with one reusable context for steps and one for each phase, which its constructor makes."""

    _step: AbstractContextManager[None]
    _phases: Mapping[str, AbstractContextManager[None]]

    def step(self) -> AbstractContextManager[None]:
        return self._step

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._phases[name]


class _NullInstrument(ContextInstrument):
    """Returns the same empty context for every step and phase."""

    _step = nullcontext()
    _phases = dict.fromkeys(PHASES, _step)


NONE: Instrument = _NullInstrument()


class CallbackContext:
    """Reusable context manager of two callbacks. Allocated once per instrument, so that a phase allocates no object."""

    __slots__ = ("_enter", "_exit")

    def __init__(self, enter: Callable[[], None], leave: Callable[[bool], None]) -> None:
        self._enter = enter
        self._exit = leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._exit(kind is not None)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each completed step, and of each phase per step (0.0 if a step did not enter the phase).

    A phase that no step entered is absent: a backend may fuse it into another one.
    """

    step_s: list[float]
    phases_s: dict[str, list[float]]


class _HostTimer:
    @staticmethod
    def mark() -> float:
        return time.perf_counter()

    @staticmethod
    def elapsed_s(start: float, end: float) -> float:
        return end - start

    @staticmethod
    def synchronize(mark: float) -> None:
        pass


class _CudaTimer:
    """Timer by CUDA events on the current stream: nothing inside a step waits, and overlap is not disturbed.

    It measures the time of the stream. `data_wait` is therefore the time that the device idled for lack of a batch, not the
    time that the host waited while the device was still busy. Only so do the phases add up to the step.
    """

    @staticmethod
    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def elapsed_s(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000.0

    @staticmethod
    def synchronize(mark: torch.cuda.Event) -> None:
        mark.synchronize()


def device_timer(device: torch.device) -> Any:
    """Return the timer of steps and phases: CUDA events on a CUDA device, the host clock elsewhere."""
    return _CudaTimer if device.type == "cuda" else _HostTimer


class PhaseClock(ContextInstrument):
    """Times steps and phases: by CUDA events on a CUDA device, by the host clock elsewhere.

    A step lasts from its beginning to its end. What the caller does between two steps, such as reporting progress, is not part
    of it; the session does all work of training inside. A step that ends in an exception is not recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._timer = device_timer(device)
        self._mark = self._timer.mark
        self._step_start: Any = None
        self._phase_start: Any = None
        self._step_phases: list[tuple[int, Any, Any]] = []  # (phase index, start, end) of the running step
        self._completed: list[tuple[Any, Any, list[tuple[int, Any, Any]]]] = []
        self._step = CallbackContext(self._begin_step, self._end_step)
        self._phases = {name: self._context(index) for index, name in enumerate(PHASES)}

    def drain(self) -> StepTimes:
        """Return the times of all steps since the last call, in order. Synchronizes with the device once."""
        steps, self._completed = self._completed, []
        if steps:
            self._timer.synchronize(steps[-1][1])
        elapsed_s = self._timer.elapsed_s
        rows = [[0.0] * len(PHASES) for _ in steps]
        entered: set[int] = set()
        for row, (_, _, phases) in zip(rows, steps, strict=True):
            for index, start, end in phases:
                row[index] += elapsed_s(start, end)
                entered.add(index)
        return StepTimes(
            [elapsed_s(start, end) for start, end, _ in steps],
            {PHASES[index]: [row[index] for row in rows] for index in sorted(entered)},
        )

    def _context(self, index: int) -> CallbackContext:
        def leave(failed: bool) -> None:
            if not failed:
                self._step_phases.append((index, self._phase_start, self._mark()))

        return CallbackContext(self._begin_phase, leave)

    def _begin_phase(self) -> None:
        self._phase_start = self._mark()

    def _begin_step(self) -> None:
        self._step_phases = []
        self._step_start = self._mark()

    def _end_step(self, failed: bool) -> None:
        if not failed:
            self._completed.append((self._step_start, self._mark(), self._step_phases))


def _ignore(state: RankState) -> None:
    pass


class ProgressTracker(ContextInstrument):
    """Instrument that tracks the stage, step and phase of the main thread, for a heartbeat thread to read.

    `state` is replaced as one object, so that a reader never sees half an update. After an exception it stays where the
    exception was raised.

    Args:
        stage: the first stage.
        on_change: called with each new state.
    """

    def __init__(self, stage: str = "build", on_change: Callable[[RankState], None] = _ignore) -> None:
        self._on_change = on_change
        self._set_state(RankState(stage, None, None, None, time.monotonic()))
        self._compiled_in: str | None = None
        self._step = CallbackContext(self._begin_step, self._end)
        self._phases = {name: self._context(name) for name in PHASES}

    def enter(self, stage: str, total_steps: int | None = None) -> None:
        """Begin a stage of `total_steps` steps; its steps are numbered from 1."""
        self._set_state(RankState(stage, None, total_steps, None, time.monotonic()))

    @contextmanager
    def within(self, stage: str, total_steps: int) -> Iterator[None]:
        """Enter a stage of `total_steps` steps between two steps of the present one, and return to that afterwards."""
        outer, step, outer_steps, _, _ = self.state
        self.enter(stage, total_steps)
        yield
        self._set_state(RankState(outer, step, outer_steps, None, time.monotonic()))

    def begin_compilation(self) -> None:
        """Replace the present phase by `COMPILATION` until `end_compilation`."""
        self._compiled_in = self.state.phase
        self._set_step(self.state.step, COMPILATION)

    def end_compilation(self) -> None:
        """Return to the phase in which the compilation began."""
        self._set_step(self.state.step, self._compiled_in)

    def _context(self, name: str) -> CallbackContext:
        return CallbackContext(lambda: self._set_step(self.state.step, name), self._end)

    def _set_step(self, step: int | None, phase: str | None) -> None:
        stage, _, total_steps, _, _ = self.state
        self._set_state(RankState(stage, step, total_steps, phase, time.monotonic()))

    def _set_state(self, state: RankState) -> None:
        self.state = state
        self._on_change(state)

    def _begin_step(self) -> None:
        self._set_step((self.state.step or 0) + 1, None)

    def _end(self, failed: bool) -> None:
        if not failed:
            self._set_step(self.state.step, None)


class CombinedInstrument(ContextInstrument):
    """Several instruments as one: entered in order, left in reverse order."""

    def __init__(self, *instruments: Instrument) -> None:
        self._step = self._combine([instrument.step() for instrument in instruments])
        self._phases = {name: self._combine([instrument.phase(name) for instrument in instruments]) for name in PHASES}

    @staticmethod
    def _combine(contexts: list[AbstractContextManager[None]]) -> AbstractContextManager[None]:
        in_reverse = contexts[::-1]

        def enter() -> None:
            for context in contexts:
                context.__enter__()

        def leave(failed: bool) -> None:
            exception = (RuntimeError, None, None) if failed else (None, None, None)
            for context in in_reverse:
                context.__exit__(*exception)

        return CallbackContext(enter, leave)
