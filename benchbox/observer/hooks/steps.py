"""Telling steps apart, by torch's global optimizer hooks.

One step of a training loop may be many calls of a torch optimizer: ZeRO-3 steps its sub-groups one by one, masters may be
stepped a bucket at a time, and several optimizers may take turns. And an optimizer that wraps another runs the hooks too. Here
a step is over when a tensor is about to be stepped again, and only the innermost optimizers count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..introspect.tensors import local_shard
from ..introspect.wrappers import optimizer_chain
from ..numerics.probes import can_look_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

Stepped = list[tuple["Mapping[str, Any]", int, "Tensor"]]  # (group, place among the optimizer's tensors, tensor)


class Listener(Protocol):
    """What is told of steps. A step is numbered from 1."""

    @property
    def saw_forward(self) -> bool: ...

    def begin(self, step: int) -> None: ...
    def before(self, optimizer: Optimizer, tensors: Stepped) -> None: ...
    def after(self, optimizer: Optimizer, tensors: Stepped) -> None: ...
    def end(self) -> None: ...


@dataclass
class _Call:
    optimizer: Optimizer
    tensors: Stepped
    wraps: bool = False
    prepares: bool = False
    ids: set[int] = field(default_factory=set)


class StepWindows:
    """Calls the listener: `begin`, then `before` and `after` for each call of an innermost optimizer, then `end` once the next
    step begins or `close` is called.
    """

    def __init__(self, listener: Listener) -> None:
        self.step = 0
        self._open = False
        self._listener = listener
        self._calls: list[_Call] = []  # nested: the outermost first
        self._done: set[int] = set()  # ids of what was stepped in this step
        self._handles: list[Any] = []
        self.wrappers: set[int] = set()  # ids of optimizers that turned out to step others
        self._running: Any = None  # the handle of the hook that torch is calling

    def install(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._run(0, self._before, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._run(1, self._after, optimizer)),
        ]

    def remove(self) -> None:
        """Tell nothing more. torch breaks off when a hook is removed while it goes through them and others follow: one that is
        running then stays, and does nothing.
        """
        for handle in self._handles:
            if handle is not self._running or _is_last(handle):
                handle.remove()
        self._handles.clear()

    def _run(self, place: int, hook: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if self._handles:
            self._running = self._handles[place]
            try:
                hook(optimizer)
            finally:
                self._running = None

    def close(self) -> None:
        """End the step that is open, if one is."""
        if self._open:
            self._open = False
            self._listener.end()

    def _before(self, optimizer: Optimizer) -> None:
        self._forget_failed(optimizer)
        if self._calls:
            self._calls[-1].wraps = True
            self.wrappers.add(id(self._calls[-1].optimizer))
        call = _Call(optimizer, _with_gradient(optimizer), wraps=self._wraps(optimizer))
        self._calls.append(call)
        if call.wraps:
            return
        if self._prepares(call.tensors):
            call.prepares = True
            return
        call.ids = {id(tensor) for _, _, tensor in call.tensors} or {id(optimizer)}
        if call.ids & self._done:
            self.close()
        if not self._open:
            self._done = set()
            self.step += 1
            self._open = True
            self._listener.begin(self.step)
        self._listener.before(optimizer, call.tensors)

    def _after(self, optimizer: Optimizer) -> None:
        if not self._calls or self._calls[-1].optimizer is not optimizer:
            return  # its beginning was not seen
        call = self._calls.pop()
        if not (call.wraps or call.prepares):
            self._done |= call.ids
            self._listener.after(optimizer, call.tensors or _with_gradient(optimizer))

    def _prepares(self, tensors: Stepped) -> bool:
        """Whether this is no step of the training: DeepSpeed and torch's distributed checkpoints take one before any forward
        pass, with gradients of zero, for the optimizer to make its state.
        """
        if self.step or self._listener.saw_forward or not tensors:
            return False
        gradients = [tensor.grad for _, _, tensor in tensors if tensor.grad is not None and can_look_at(tensor)]
        return len(gradients) == len(tensors) and not any(local_shard(gradient).any() for gradient in gradients)

    def _wraps(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self.wrappers or len(optimizer_chain(optimizer)) > 1

    def _forget_failed(self, optimizer: Optimizer) -> None:
        """A call that raised had no end; the optimizer cannot be inside itself."""
        for place, call in enumerate(self._calls):
            if call.optimizer is optimizer:
                del self._calls[place:]
                return


def _is_last(handle: Any) -> bool:
    """Whether no hook of anybody else comes after this one."""
    hooks = handle.hooks_dict_ref()
    return hooks is not None and next(reversed(hooks), None) == handle.id


def _with_gradient(optimizer: Optimizer) -> Stepped:
    found: Stepped = []
    place = 0
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None:
                found.append((group, place, tensor))
            place += 1
    return found
