"""Observer of optimizer steps: installs the hooks, records a few steps, removes the hooks and gives the facts."""

from __future__ import annotations

import functools
import os
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .build_facts import build_facts
from .facts import SECTIONS, RankFacts
from .hooks.steps import StepSegmenter
from .hooks.tracing import is_capturing
from .introspect.discovery import TrainingObjects
from .recording import StepRecorder
from .state import ObserverState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import nn
    from torch.optim import Optimizer

    from .facts import Contract
    from .hooks.operations import OperationRecorder
    from .hooks.steps import SteppedTensors


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Turn an exception of the observer into a recorded problem: the observer stops, and the training continues.

    An observer that has stopped does nothing, nor does one whose calls a CUDA graph captures.
    """

    @functools.wraps(method)
    def guarded(self: StepObserver, *args: Any) -> None:
        if not self._installed or is_capturing():
            return
        records_gradients = torch.is_grad_enabled()
        # `torch.no_grad` takes seven times as long, and there may be thousands of calls in a step.
        torch._C._set_grad_enabled(False)  # noqa: SLF001
        try:
            method(self, *args)
        except Exception as error:  # noqa: BLE001 (no error of the observer may reach the training)
            self.fail(error, method.__name__)
        finally:
            torch._C._set_grad_enabled(records_gradients)  # noqa: SLF001

    return guarded


def _describe(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = next(iter(str(error).splitlines()), "")  # torch prints a page when it lacks an operation
    return f"{type(error).__name__}: {message} ({frame.name}, line {frame.lineno})"


class StepObserver:
    """Watches the first `steps` optimizer steps taken while it is installed, then removes itself.

        with StepObserver(source="command", steps=20) as observer:
            train()
        facts = observer.facts()

    The first, the middle and the last step are probed: their tensors are sampled before and after. An optimizer that takes no
    part in one of them is probed when it steps next. In the step after the middle one every operation is recorded. Any other
    step costs a few Python calls. The observer only reads: no tensor, random state or result of the training changes.

    Args:
        source: session or command, for the facts.
        steps: number of steps to watch.
        model, optimizer, schedules: the wrapped model, the outermost optimizer and the schedules. Those not passed are searched
            for among the objects of the process at the first step.
        contract: the declared dtypes, for the facts.
        operations: operations of one step, recorded by the caller; the observer then neither records any nor probes the
            middle step.
        on_call: called with this observer after each call of an optimizer that steps tensors itself.
        on_done: called once with this observer, after the last step.
    """

    def __init__(
        self,
        *,
        source: str,
        steps: int = 6,
        model: nn.Module | None = None,
        optimizer: Any = None,
        schedules: Sequence[Any] | None = None,
        contract: Contract | None = None,
        operations: OperationRecorder | None = None,
        on_call: Callable[[StepObserver], None] | None = None,
        on_done: Callable[[StepObserver], None] | None = None,
    ) -> None:
        state = ObserverState(source, contract, optimizer, TrainingObjects(schedules=list(schedules or ())))
        if operations is not None:
            state.operations = operations
        state.guard.report = self.fail
        state.locations.before_conversion = self.before_conversion
        self._recorder = StepRecorder(state, steps, model, optimizer, schedules)
        self._segmenter = StepSegmenter(self)
        self._on_call, self._on_done = on_call, on_done
        self._problems: list[str] = []
        self._installed = False
        self._rank: tuple[int, int] | None = None
        self._facts_before_conversion: RankFacts | None = None
        self._final_facts: RankFacts | None = None

    def __enter__(self) -> StepObserver:  # noqa: PYI034 (Self came with Python 3.11)
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.remove()

    def install(self) -> None:
        """Start watching."""
        self._installed = True
        self._segmenter.install()
        self._recorder.install()

    def remove(self) -> None:
        """Stop watching, before the last step or after it."""
        if self._installed:
            self._finish()
        if self._installed:  # unless finishing failed, and stopped the observer
            self._stop()

    def record_norm(self, norm: Any, max_norm: float) -> None:
        """Record the gradient norm that clipping returned for the latest step, and its limit."""
        if self._installed and self._state.steps:
            self._state.steps[-1].reported = (norm, max_norm)

    def record_skip(self) -> None:
        """Record that the trainer skipped a step on purpose: its schedule advances, and no weight changes."""
        self._state.skipped += 1

    def facts(self) -> RankFacts:
        """Return the facts observed so far. They are final once the observer has stopped."""
        return self._final_facts or self._facts_before_conversion or self._current_facts()

    @property
    def steps_observed(self) -> int:
        return len(self._state.steps)

    @property
    def probed_latest_step(self) -> bool:
        """True if the tensors of an optimizer were probed in the latest step."""
        return bool(self._state.steps) and bool(self._state.steps[-1].probed)

    @property
    def every_step_skipped(self) -> bool:
        """True if a gradient scaler skipped all steps that it was asked for."""
        return not self._state.steps and self._state.calls.scaled_steps > 0

    @property
    def unobserved(self) -> str | None:
        """Reason why the steps of an optimizer were not observed, compiled or captured in a CUDA graph; None if all were."""
        return self._segmenter.unobserved(self._state.optimizers.keys())

    @property
    def has_failed(self) -> bool:
        """True if the observer stopped because of an exception of its own."""
        return bool(self._problems)

    @property
    def forward_called(self) -> bool:
        return self._state.forward_hooks.called

    @property
    def rank(self) -> tuple[int, int]:
        """(rank, world size), those of the process group also after it was destroyed."""
        if dist.is_available() and dist.is_initialized():
            self._rank = (dist.get_rank(), dist.get_world_size())
        return self._rank or (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    # Called by the segmenter:

    @_guarded
    def begin_step(self, step: int) -> None:
        """Record the beginning of a step. The step after the last one removes the observer."""
        self._state.operations.leave()
        self._state.operations.raise_failure()
        if step <= self._recorder.last_step:
            self._recorder.begin_step(step)
        else:
            self._recorder.compare_live()
            self.remove()
            if self._on_done is not None:
                self._on_done(self)

    @_guarded
    def before_call(self, optimizer: Optimizer, tensors: SteppedTensors) -> None:
        """Record an optimizer before it steps."""
        self._facts_before_conversion = None
        self._recorder.before_call(optimizer, tensors)

    @_guarded
    def after_call(self, optimizer: Optimizer, tensors: SteppedTensors, closure_calls: int) -> None:
        """Record an optimizer after it stepped."""
        self._state.calls.steps_taken += 1
        self._recorder.after_call(optimizer, tensors, closure_calls)
        if self._recorder.expects_copies:
            self._state.forward_hooks.before_next_call(self.before_forward)
        if self._on_call is not None:
            self._on_call(self)

    @_guarded
    def before_forward(self) -> None:
        """Compare masters with the live parameters that the next forward pass is about to use."""
        self._recorder.compare_live()

    @_guarded
    def before_conversion(self, module: nn.Module) -> None:
        """Keep the facts from before a model is cast or moved. If no step follows, that was done to save or to use it."""
        if self._facts_before_conversion is None and self._recorder.trains(module):
            self._recorder.end_step()
            with self._recorder.finished_for_now():
                self._facts_before_conversion = self._current_facts()

    @_guarded
    def end_step(self) -> None:
        """Record the end of a step."""
        self._recorder.end_step()

    def fail(self, error: Exception, where: str = "hooks") -> None:
        """Record a failure of the observer, and stop: the training continues."""
        self._problems.append(f"{where}: {_describe(error)}")
        self._facts_before_conversion = None  # which have no problem
        if self._installed:
            self._stop()

    @property
    def _state(self) -> ObserverState:
        return self._recorder.state

    @_guarded
    def _finish(self) -> None:
        self._segmenter.close()
        self._recorder.finish()

    def _stop(self) -> None:
        """Remove everything that was installed, keep the facts, and release the training's objects."""
        self._installed = False
        self._segmenter.remove()
        self._recorder.remove()
        self._final_facts = self._facts_before_conversion or self._build_final_facts()
        for observation in self._state.steps:
            observation.release()
        self._recorder = StepRecorder(ObserverState(self._state.source, steps=self._state.steps), self._recorder.last_step)

    def _current_facts(self) -> RankFacts:
        for wrapper in self._segmenter.wrappers & self._state.optimizers.keys():
            del self._state.optimizers[wrapper]
        return build_facts(self._state, *self.rank, tuple(self._problems), unobserved=self.unobserved)

    def _build_final_facts(self) -> RankFacts:
        try:
            return self._current_facts()
        except Exception as error:  # noqa: BLE001 (no error of the observer may reach the training)
            rank, world_size = self.rank
            problems = (*self._problems, f"build_facts: {_describe(error)}")
            missing = dict.fromkeys(SECTIONS, "the observer failed before this was recorded")
            return RankFacts(rank=rank, world_size=world_size, source=self._state.source, missing=missing, problems=problems)
