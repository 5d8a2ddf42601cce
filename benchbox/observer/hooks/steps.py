"""Segmentation of a training into steps, by torch's global optimizer hooks.

One step of a training loop may be many calls of torch optimizers: ZeRO-3 steps its sub-groups one by one, masters may be
stepped bucket by bucket, and several optimizers may take turns. An optimizer that wraps another one runs the hooks too. Here a
step ends when one of its tensors is about to be stepped again, and only the innermost optimizers count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..introspect.tensors import local_shard
from ..introspect.wrappers import optimizer_chain
from ..numerics.probes import can_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

SteppedTensors = list[tuple["Mapping[str, Any]", int, "Tensor"]]  # (group, index among the optimizer's tensors, tensor)


class StepListener(Protocol):
    """Receiver of steps, numbered from 1, and of the optimizer calls in them."""

    @property
    def forward_called(self) -> bool: ...

    def begin_step(self, step: int) -> None: ...
    def before_call(self, optimizer: Optimizer, tensors: SteppedTensors) -> None: ...
    def after_call(self, optimizer: Optimizer, tensors: SteppedTensors) -> None: ...
    def end_step(self) -> None: ...


@dataclass
class _OptimizerCall:
    optimizer: Optimizer
    tensors: SteppedTensors
    wraps: bool = False
    initializes: bool = False
    ids: set[int] = field(default_factory=set)


class StepSegmenter:
    """Calls the listener at the begin and end of each step, and before and after each call of an innermost optimizer in it.

    A step ends when the next one begins or `close` is called.
    """

    def __init__(self, listener: StepListener) -> None:
        self.step = 0
        self.wrappers: set[int] = set()  # ids of optimizers that turned out to step others
        self._is_open = False
        self._listener = listener
        self._calls: list[_OptimizerCall] = []  # nested, outermost first
        self._stepped: set[int] = set()  # ids of the tensors stepped in this step
        self._handles: list[Any] = []
        self._running: Any = None  # the handle of the hook that torch is calling

    def install(self) -> None:
        """Register the hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._run(0, self._before, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._run(1, self._after, optimizer)),
        ]

    def remove(self) -> None:
        """Call the listener no more, and remove the hooks.

        torch raises when a hook is removed while torch iterates over the hooks and others follow. A hook that is running
        therefore stays registered, and does nothing.
        """
        for handle in self._handles:
            if handle is not self._running or _is_last_hook(handle):
                handle.remove()
        self._handles.clear()

    def _run(self, index: int, hook: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if self._handles:
            self._running = self._handles[index]
            try:
                hook(optimizer)
            finally:
                self._running = None

    def close(self) -> None:
        """End the current step, if there is one."""
        if self._is_open:
            self._is_open = False
            self._listener.end_step()

    def _before(self, optimizer: Optimizer) -> None:
        self._drop_failed_calls(optimizer)
        if self._calls:
            self._calls[-1].wraps = True
            self.wrappers.add(id(self._calls[-1].optimizer))
        call = _OptimizerCall(optimizer, _tensors_with_gradient(optimizer), wraps=self._is_wrapper(optimizer))
        self._calls.append(call)
        if call.wraps:
            return
        if self._initializes_state(call.tensors):
            call.initializes = True
            return
        call.ids = {id(tensor) for _, _, tensor in call.tensors} or {id(optimizer)}
        if call.ids & self._stepped:
            self.close()
        if not self._is_open:
            self._stepped = set()
            self.step += 1
            self._is_open = True
            self._listener.begin_step(self.step)
        self._listener.before_call(optimizer, call.tensors)

    def _after(self, optimizer: Optimizer) -> None:
        if not self._calls or self._calls[-1].optimizer is not optimizer:
            return  # the call began before the hooks were installed
        call = self._calls.pop()
        if not (call.wraps or call.initializes):
            self._stepped |= call.ids
            self._listener.after_call(optimizer, call.tensors or _tensors_with_gradient(optimizer))

    def _initializes_state(self, tensors: SteppedTensors) -> bool:
        """Return whether this call is no training step but only creates optimizer state.

        DeepSpeed and torch's distributed checkpoints step once before any forward pass, with gradients of zero.
        """
        if self.step or self._listener.forward_called or not tensors:
            return False
        gradients = [tensor.grad for _, _, tensor in tensors if tensor.grad is not None and can_probe(tensor)]
        return len(gradients) == len(tensors) and not any(local_shard(gradient).any() for gradient in gradients)

    def _is_wrapper(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self.wrappers or len(optimizer_chain(optimizer)) > 1

    def _drop_failed_calls(self, optimizer: Optimizer) -> None:
        """Drop calls without an end: this optimizer cannot be inside itself, so its earlier call raised."""
        for depth, call in enumerate(self._calls):
            if call.optimizer is optimizer:
                del self._calls[depth:]
                return


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
