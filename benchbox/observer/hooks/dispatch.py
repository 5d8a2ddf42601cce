"""Looking at every tensor operation of a step, collectives included, below autograd."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Observer(Protocol):
    def on_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Called after each operation with plain local tensors.

        `operation` is an `OpOverload` or, where torch keeps a kernel whole (FlexAttention), a `HigherOrderOperator`.
        """


class OperationDispatchMode(TorchDispatchMode):
    """Shows observers every operation inside the with block, forward, backward and optimizer alike.

    It slows a step down a great deal: never around one that is timed.
    """

    # Without it torch refuses to run those at all under a mode.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled, and what is fused in it is not seen.

        Run operation by operation it would round elsewhere, and compiled FlexAttention would not run at all.
        """
        return True

    def __init__(self, *observers: Observer) -> None:
        super().__init__()
        self._observers = observers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A DTensor unwraps itself when declined, and the operations on its local tensors and its collectives arrive here.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        options = kwargs or {}
        result = func(*args, **options)
        for observer in self._observers:
            observer.on_operation(func, args, options, result)
        return result


def operation_name(operation: Any) -> str:
    """Without namespace and overload."""
    name: str = getattr(operation, "overloadpacket", operation).__name__
    return name


def is_recomputing() -> bool:
    """Whether the running operation repeats a forward inside the backward pass, as activation checkpointing does.

    Backward itself runs without recording gradients; a forward that is repeated in it records them again.
    """
    return in_backward() and torch.is_grad_enabled()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 (torch has no public way to ask)
