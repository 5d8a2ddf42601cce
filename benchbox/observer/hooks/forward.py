"""Forward hooks: micro-batches of a step, the autocast they ran under, and the dtype gradients accumulate in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..facts import Autocast
from ..introspect.tensors import dtype_name, has_class_named
from .dispatch import in_backward
from .tracing import TraceWatch, note_traced_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .guard import FailureGuard

_DEVICES = ("cuda", "cpu")


class ForwardHooks:
    """Counts calls of modules that record gradients, while installed. `roots` are the ids of outermost modules, once known.

    Several calls of a module before one backward pass, as of a network that compares two inputs, are one micro-batch.
    """

    def __init__(self, guard: FailureGuard) -> None:
        self._guard = guard
        self._backward_passes = 0
        self.roots: set[int] = set()
        self.autocast: Autocast | None = None
        self.accumulated_in: set[str] = set()
        # By module id: the module, its micro-batches, and the backward passes before the latest of them
        self._calls: dict[int, list[Any]] = {}
        self._handle: Any = None
        self._is_counting = False
        self._before_next_call: Callable[[], None] | None = None
        self._compiled = TraceWatch("forward")

    def install(self) -> None:
        """Start counting from zero, unless already installed."""
        if not self._is_counting:
            self._is_counting = True
            self._calls.clear()
        self._register()

    def note_backward(self) -> None:
        """Note the end of a backward pass: a call after it belongs to another micro-batch."""
        self._backward_passes += 1

    def before_next_call(self, action: Callable[[], None]) -> None:
        """Run an action once, before the next call of a module that records gradients."""
        self._before_next_call = action
        self._register()

    def _register(self) -> None:
        if self._handle is None:
            self._compiled = TraceWatch("forward")
            self._handle = register_module_forward_pre_hook(self._before_forward)

    def _unregister(self) -> None:
        if self._handle is not None and not self._compiled:  # else it stays, idle
            self._handle.remove()
            self._handle = None

    @property
    def called(self) -> bool:
        """True once a module was called since the hook was installed."""
        return bool(self._calls)

    def remove(self) -> tuple[int | None, list[nn.Module]]:
        """Stop counting and return (micro-batches, modules that were called); (None, []) if not installed."""
        self._before_next_call = None
        if not self._is_counting:
            self._unregister()
            return None, []
        self._is_counting = False
        self._unregister()
        modules = [module for module, _, _ in self._calls.values()]
        children = {id(child) for module in modules for child in module.children()}
        counts = [count for module, count, _ in self._calls.values() if id(module) not in children]
        self._calls.clear()
        return (max(counts) if counts else 0), modules

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            note_traced_forward()
            return
        with self._guard:
            self._record(module)

    def _record(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        if self._before_next_call is not None:
            action, self._before_next_call = self._before_next_call, None
            action()
        if not self._is_counting:
            self._unregister()
            return
        entry = self._calls.setdefault(id(module), [module, 0, -1])
        if entry[2] != self._backward_passes:
            entry[1:] = [entry[1] + 1, self._backward_passes]
            if entry[1] > 1 and id(module) in self.roots:
                self.accumulated_in.update(dtype_name(gradient) for gradient in _accumulated_gradients(module))
        if self.autocast is None or not self.autocast.active:
            self.autocast = _current_autocast()


def _accumulated_gradients(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the gradients that the next micro-batch is added to: on the parameters, or in DeepSpeed's own buffers."""
    optimizer: Any = getattr(module, "optimizer", None)
    if has_class_named(optimizer, "BF16_Optimizer"):  # it clears the parameters' gradients before each backward pass
        yield from optimizer.fp32_groups_gradients_flat
        return
    for attribute in ("averaged_gradients", "all_grad_tensors"):  # ZeRO-3; ZeRO-1 and 2
        for gradients in (getattr(optimizer, attribute, None) or {}).values():
            yield from (gradient for gradient in gradients or () if gradient is not None)
    for parameter in module.parameters():
        if not parameter.is_leaf:  # in place of a parameter for this call, as by functional_call: asked for, torch would warn
            continue
        for gradient in (parameter.grad, getattr(parameter, "grad_accum", None)):
            if gradient is not None:
                yield gradient


def _current_autocast() -> Autocast:
    for device in _DEVICES:
        if torch.is_autocast_enabled(device):
            return Autocast(active=True, dtype=str(torch.get_autocast_dtype(device)).removeprefix("torch."))
    return Autocast(active=False)
