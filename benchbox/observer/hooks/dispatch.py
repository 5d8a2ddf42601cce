"""Dispatch mode that shows every tensor operation of a step to listeners, collectives included, below autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    _Receive = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class OperationListener(Protocol):
    """Receiver of tensor operations. One that has a method `is_relevant(operation) -> bool` receives only those it accepts."""

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Receive one operation after it ran, with plain local tensors.

        `operation` is an `OpOverload` or, where torch keeps a kernel as one (FlexAttention), a `HigherOrderOperator`.
        """


class OperationDispatchMode(TorchDispatchMode):
    """Shows listeners every operation inside the with block: of forward, backward and optimizer.

    It slows a step down considerably: do not use it around a step that is timed.
    """

    # Without this, torch refuses to run higher-order operators under a mode.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs compiled, and operations fused in it are not shown.

        Run operation by operation it would round differently, and compiled FlexAttention would not run at all.
        """
        return True

    def __init__(self, *listeners: OperationListener) -> None:
        super().__init__()
        self._listeners = listeners
        self._receivers: dict[Any, tuple[_Receive, ...]] = {}  # by operation: a step has thousands of calls of a few dozen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Declined, a DTensor unwraps itself, and the operations on its local tensors and its collectives arrive here.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        receivers = self._receivers.get(func)
        if receivers is None:
            receivers = self._receivers[func] = tuple(_receivers(func, self._listeners))
        for receive in receivers:
            receive(func, args, kwargs, result)
        return result

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""
        return operation(*args, **kwargs)


def _receivers(operation: Any, listeners: Iterable[OperationListener]) -> Iterator[_Receive]:
    for listener in listeners:
        is_relevant = getattr(listener, "is_relevant", None)
        if is_relevant is None or is_relevant(operation):
            yield listener.on_operation


def operation_name(operation: Any) -> str:
    """Return the name of an operation without namespace and overload."""
    name: str = getattr(operation, "overloadpacket", operation).__name__
    return name


def is_recomputing() -> bool:
    """Return whether the running operation repeats a forward inside the backward pass, as activation checkpointing does.

    Backward itself runs with gradients disabled; a repeated forward enables them again. The forward of a custom
    `autograd.Function`, as of DeepSpeed's linear layer under ZeRO-3, disables them once more, and forward-mode gradients with
    them, which backward leaves enabled. A Function that another one's backward calls is therefore taken for a repeated forward.
    """
    in_function_forward = not torch._C._is_fwd_grad_enabled()  # noqa: SLF001 (torch has no public function for this)
    return in_backward() and (torch.is_grad_enabled() or in_function_forward)


def in_backward() -> bool:
    """Return whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 (torch has no public function for this)
