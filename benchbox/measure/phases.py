"""Instruments: phases in, samples out.

The step opens `step()` once and `phase(name)` around each of its parts; whoever wants to know passes an instrument. The step
never learns what is listening, and the null instrument listens to nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchbox.registry.phases import PHASES as PHASES
from benchbox.registry.phases import RankState

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType


class Instrument(Protocol):
    """What a step reports to. Phases of one step never nest; one that occurs again (accumulation) adds up."""

    def step(self) -> AbstractContextManager[None]:
        """Open around one whole optimizer step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Open around one phase, `name` being one of `PHASES`."""


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


_NOTHING = _Nothing()


class _Null:
    """Every call hands out the same empty context manager."""

    __slots__ = ()

    def step(self) -> AbstractContextManager[None]:
        return _NOTHING

    def phase(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return _NOTHING


NONE: Instrument = _Null()


class _Span:
    """A reusable context manager: instruments allocate theirs once, so that a phase costs two calls and no objects."""

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
    """Seconds of each completed step, and of each phase in each of them (0.0 where a step did not enter the phase).

    A phase that no step entered is absent: a backend that fuses it has no time of its own to report.
    """

    step_s: list[float]
    phases_s: dict[str, list[float]]


class _HostTimer:
    @staticmethod
    def mark() -> float:
        return time.perf_counter()

    @staticmethod
    def seconds(start: float, end: float) -> float:
        return end - start

    @staticmethod
    def settle(last: float) -> None:
        pass


class _CudaTimer:
    """Marks are events on the current stream, so nothing waits inside a step and overlap is left as it is.

    Time is that of the stream: `data_wait` is then how long the device stood idle for want of a batch, not how long the host
    waited while the device still had work. That is what makes the phases add up to the step.
    """

    @staticmethod
    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000.0

    @staticmethod
    def settle(last: torch.cuda.Event) -> None:
        last.synchronize()


class PhaseClock:
    """Times steps and phases: by CUDA events on a CUDA device, by the host clock elsewhere.

    A step that ends in an exception is not recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._timer: Any = _CudaTimer if device.type == "cuda" else _HostTimer
        self._mark = self._timer.mark
        self._step_start: Any = None
        self._phase_start: Any = None
        self._open: list[tuple[int, Any, Any]] = []  # (phase index, start, end) of the running step
        self._done: list[tuple[Any, Any, list[tuple[int, Any, Any]]]] = []
        self._step = _Span(self._begin_step, self._end_step)
        self._phases = {name: self._span(index) for index, name in enumerate(PHASES)}

    def step(self) -> AbstractContextManager[None]:
        return self._step

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._phases[name]

    def drain(self) -> StepTimes:
        """The times of all steps since the last call, in order. Waits for the device here, once."""
        done, self._done = self._done, []
        if done:
            self._timer.settle(done[-1][1])
        seconds = self._timer.seconds
        rows = [[0.0] * len(PHASES) for _ in done]
        seen: set[int] = set()
        for row, (_, _, phases) in zip(rows, done, strict=True):
            for index, start, end in phases:
                row[index] += seconds(start, end)
                seen.add(index)
        return StepTimes(
            [seconds(start, end) for start, end, _ in done],
            {PHASES[index]: [row[index] for row in rows] for index in sorted(seen)},
        )

    def _span(self, index: int) -> _Span:
        def leave(failed: bool) -> None:
            if not failed:
                self._open.append((index, self._phase_start, self._mark()))

        return _Span(self._begin_phase, leave)

    def _begin_phase(self) -> None:
        self._phase_start = self._mark()

    def _begin_step(self) -> None:
        self._open = []
        self._step_start = self._mark()

    def _end_step(self, failed: bool) -> None:
        if not failed:
            self._done.append((self._step_start, self._mark(), self._open))


def _forget(state: RankState) -> None:
    pass


class ProgressTracker:
    """Remembers where the main thread stands, for a heartbeat thread to read, and tells `keep` of every move.

    `state` is replaced as a whole, so that a reader never sees half a change. After an exception it stays where it was raised.
    """

    def __init__(self, stage: str = "build", keep: Callable[[RankState], None] = _forget) -> None:
        self._keep = keep
        self._be_at(RankState(stage, None, None, None, time.time()))
        self._step = _Span(self._next_step, self._leave)
        self._phases = {name: self._span(name) for name in PHASES}

    def enter(self, stage: str, of: int | None = None) -> None:
        """Begin a stage of `of` steps; the next step is its number 1."""
        self._be_at(RankState(stage, None, of, None, time.time()))

    def step(self) -> AbstractContextManager[None]:
        return self._step

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._phases[name]

    def _span(self, name: str) -> _Span:
        return _Span(lambda: self._move(self.state.step, name), self._leave)

    def _move(self, step: int | None, phase: str | None) -> None:
        stage, _, of, _, _ = self.state
        self._be_at(RankState(stage, step, of, phase, time.time()))

    def _be_at(self, state: RankState) -> None:
        self.state = state
        self._keep(state)

    def _next_step(self) -> None:
        self._move((self.state.step or 0) + 1, None)

    def _leave(self, failed: bool) -> None:
        if not failed:
            self._move(self.state.step, None)


class CombinedInstrument:
    """Several instruments as one: entered in the order given, left in the reverse."""

    def __init__(self, *instruments: Instrument) -> None:
        self._step = self._join([instrument.step() for instrument in instruments])
        self._phases = {name: self._join([instrument.phase(name) for instrument in instruments]) for name in PHASES}

    def step(self) -> AbstractContextManager[None]:
        return self._step

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._phases[name]

    @staticmethod
    def _join(parts: list[AbstractContextManager[None]]) -> AbstractContextManager[None]:
        backwards = parts[::-1]

        def enter() -> None:
            for part in parts:
                part.__enter__()

        def leave(failed: bool) -> None:
            reason = (RuntimeError, None, None) if failed else (None, None, None)
            for part in backwards:
                part.__exit__(*reason)

        return _Span(enter, leave)
