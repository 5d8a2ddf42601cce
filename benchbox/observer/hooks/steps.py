"""Segmentation of a training into steps, by torch's global optimizer hooks.

One step of a training loop may be many calls of torch optimizers: ZeRO-3 steps its sub-groups one by one, masters may be
stepped bucket by bucket, and several optimizers may take turns. An optimizer that wraps another one runs the hooks too. Here a
step ends when one of its tensors is about to be stepped again, and only the innermost optimizers count. An optimizer that is
passed a closure has no gradients before it calls it: its call begins when the closure has returned for the first time.
"""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..introspect.discovery import attribute_values
from ..introspect.tensors import local_shard
from ..introspect.wrappers import optimizer_chain
from ..numerics.probes import can_probe
from .tracing import TraceWatch, is_capturing, note_traced_step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from types import FrameType

    from torch import Tensor
    from torch.optim import Optimizer

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call of `step`, the optimizer included

SteppedTensors = list[tuple["Mapping[str, Any]", int, "Tensor"]]  # (group, index among the optimizer's tensors, tensor)


class StepListener(Protocol):
    """Receiver of steps, numbered from 1, and of the optimizer calls in them."""

    @property
    def forward_called(self) -> bool: ...

    def begin_step(self, step: int) -> None: ...
    def before_call(self, optimizer: Optimizer, tensors: SteppedTensors) -> None: ...
    def after_call(self, optimizer: Optimizer, tensors: SteppedTensors, closure_calls: int) -> None: ...
    def end_step(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


@dataclass(eq=False)
class _OptimizerCall:
    optimizer: Optimizer
    thread: int = field(default_factory=threading.get_ident)
    wraps: bool = False
    initializes: bool = False
    begun: bool = False
    in_closure: bool = False
    closure_calls: int = 0
    tensors: SteppedTensors = field(default_factory=list)
    ids: set[int] = field(default_factory=set)


class StepSegmenter:
    """Calls the listener at the beginning and end of each step, and before and after each call of an innermost optimizer in it.

    A step ends when the next one begins or `close` is called.
    """

    def __init__(self, listener: StepListener) -> None:
        self.step = 0
        self.wrappers: set[int] = set()  # ids of optimizers that turned out to step others
        self._compiled = TraceWatch("step")  # whether a step is compiled: it runs no hooks
        self._captured: set[int] = set()  # ids of optimizers that step in a CUDA graph, whose replays run none either
        self._is_open = False
        self._listener = listener
        self._calls: list[_OptimizerCall] = []  # nested, outermost first, of each thread
        self._threads: set[int] = set()  # those that stepped optimizers
        self._stepped: set[int] = set()  # ids of the tensors stepped in this step
        self._handles: list[Any] = []
        self._running: Any = None  # the handle of the hook that torch is calling

    def install(self) -> None:
        """Register the hooks."""

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            if torch.compiler.is_compiling():
                note_traced_step()
                return None
            if is_capturing():
                self._run(None, lambda: self._note_capture(optimizer))
                return None
            frame = sys._getframe(1)  # noqa: SLF001 (`inspect` reads every source file)
            arguments: Arguments | None = self._run(0, lambda: self._before(optimizer, frame, args, kwargs))
            return arguments

        def after(optimizer: Optimizer, *_: Any) -> None:
            if torch.compiler.is_compiling():
                note_traced_step()
            elif not is_capturing():
                self._run(1, lambda: self._after(optimizer))

        self._compiled = TraceWatch("step")
        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def remove(self) -> None:
        """Call the listener no more, and remove the hooks.

        torch raises when a hook is removed while torch iterates over the hooks and others follow. A hook that is running
        therefore stays registered, and does nothing; so do hooks that were compiled, and those that several threads may run.
        The end of a running call is not seen: it is forgotten, with its optimizer.
        """
        self._calls.clear()
        for handle in self._handles:
            is_removable = not self._compiled and len(self._threads) < 2
            if is_removable and (handle is not self._running or _is_last_hook(handle)):
                handle.remove()
        self._handles.clear()

    def unobserved(self, observed: Collection[int]) -> str | None:
        """Return why the steps of an optimizer were not observed, but for those whose ids are given; None if all were."""
        if self._compiled:
            return "the step is compiled: not observed"
        captured = self._captured.difference(observed, self.wrappers)
        return "the step is captured in a CUDA graph: not observed" if captured else None

    def _note_capture(self, optimizer: Optimizer) -> None:
        if len(optimizer_chain(optimizer)) == 1:
            self._captured.add(id(optimizer))

    def _run(self, index: int | None, action: Callable[[], Any]) -> Any:
        """Return the result of an action inside a hook, or outside of the hooks if `index` is None. No error gets out."""
        if not self._handles:
            return None
        self._running = None if index is None else self._handles[index]
        try:
            return action()
        except Exception as error:  # noqa: BLE001 (no error of the observer may reach the training)
            self._listener.fail(error)
            return None
        finally:
            self._running = None

    def close(self) -> None:
        """End the current step, if there is one."""
        if self._is_open:
            self._is_open = False
            self._listener.end_step()

    def _before(
        self, optimizer: Optimizer, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Begin a call. Return the arguments of the step if its closure is to be replaced.

        Args:
            frame: of torch's hooked `step`, which runs the hooks and then the step itself.
            optimizer, args, kwargs: of that step.
        """
        if self._calls:
            self._drop_failed_calls(optimizer, frame)
        call = _OptimizerCall(optimizer, wraps=self._is_wrapper(optimizer))
        self._threads.add(call.thread)
        outer = (self._latest_call(call.thread) or self._wrapping_call(optimizer)) if self._calls else None
        if outer is not None and not outer.in_closure:
            outer.wraps = True
            self.wrappers.add(id(outer.optimizer))
        self._calls.append(call)
        if call.wraps:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._observed_closure(args[1], call), *args[2:]), kwargs
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": self._observed_closure(closure, call)}
        self._begin(call, _tensors_with_gradient(optimizer))
        return None

    def _latest_call(self, thread: int) -> _OptimizerCall | None:
        """Return the innermost call that runs in a thread. Optimizers in other threads step independently of it."""
        return next((call for call in reversed(self._calls) if call.thread == thread), None)

    def _wrapping_call(self, optimizer: Optimizer) -> _OptimizerCall | None:
        """Return the call, in another thread, of an optimizer that has this one in an attribute and steps it in a pool."""
        return next(
            (call for call in self._calls if any(value is optimizer for value in attribute_values(call.optimizer))), None
        )

    def _observed_closure(self, closure: Callable[..., Any], call: _OptimizerCall) -> Callable[..., Any]:
        """Return a closure that begins the call when it has returned for the first time: gradients are there only then."""

        def begin() -> None:
            call.closure_calls += 1
            if call.closure_calls == 1 and not call.wraps and call in self._calls:
                self._begin(call, _tensors_with_gradient(call.optimizer))

        @functools.wraps(closure)
        def observed(*args: Any, **kwargs: Any) -> Any:
            call.in_closure = True
            result = closure(*args, **kwargs)
            call.in_closure = False
            self._run(None, begin)
            return result

        return observed

    def _begin(self, call: _OptimizerCall, tensors: SteppedTensors) -> None:
        call.begun = True
        call.tensors = tensors
        if self._initializes_state(tensors):
            call.initializes = True
            return
        call.ids = {id(tensor) for _, _, tensor in tensors} or {id(call.optimizer)}
        if call.ids & self._stepped:
            self.close()
        if not self._is_open:
            self._stepped = set()
            self.step += 1
            self._is_open = True
            self._listener.begin_step(self.step)
        self._listener.before_call(call.optimizer, tensors)

    def _after(self, optimizer: Optimizer) -> None:
        call = self._latest_call(threading.get_ident())
        if call is None or call.optimizer is not optimizer:
            return  # the call began before the hooks were installed
        self._calls.remove(call)
        if call.wraps or call.initializes:
            return
        if not call.begun:  # its closure was not called: the tensors before the step are unknown
            self._begin(call, [])
        self._stepped |= call.ids
        self._listener.after_call(optimizer, call.tensors or _tensors_with_gradient(optimizer), call.closure_calls)

    def _initializes_state(self, tensors: SteppedTensors) -> bool:
        """Return whether this call is no training step but only creates optimizer state.

        DeepSpeed and torch's distributed checkpoints step once before any forward pass, with gradients of zero. Scripts step
        without gradients there, to be spared a warning of schedules that advance first.
        """
        if self.step or self._listener.forward_called:
            return False
        gradients = [tensor.grad for _, _, tensor in tensors if tensor.grad is not None and can_probe(tensor)]
        return len(gradients) == len(tensors) and not any(local_shard(gradient).any() for gradient in gradients)

    def _is_wrapper(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self.wrappers or len(optimizer_chain(optimizer)) > 1

    def _drop_failed_calls(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Drop calls that raised, and so have no end: those that do not run around this frame of torch's hooked `step`.

        A step that calls the `step` of its base class runs the hooks twice. Its inner call counts. A call of another thread is
        not in the frames of this one, and may still run: on a GPU, autograd calls hooks of the backward pass in a thread.
        """
        running = {id(outer) for outer in _optimizers_around(frame)}
        here = threading.get_ident()
        self._calls[:] = [
            call
            for call in self._calls
            if call.optimizer is not optimizer and (call.thread != here or id(call.optimizer) in running)
        ]


def _optimizers_around(frame: FrameType) -> Iterator[Any]:
    """Yield the optimizers whose steps run around this frame of torch's hooked `step`."""
    hooked_step, outer = frame.f_code, frame.f_back
    while outer is not None:
        if outer.f_code is hooked_step:
            yield outer.f_locals.get("self")
        outer = outer.f_back


def _is_last_hook(handle: Any) -> bool:
    """Return whether no other hook follows this one."""
    hooks = handle.hooks_dict_ref()
    return hooks is not None and next(reversed(hooks), None) == handle.id


def _tensors_with_gradient(optimizer: Optimizer) -> SteppedTensors:
    tensors: SteppedTensors = []
    index = 0
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None:
                tensors.append((group, index, tensor))
            index += 1
    return tensors
