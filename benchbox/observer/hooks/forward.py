"""Watching modules being called: how many micro-batches a step has, under which autocast, into which gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..facts import Autocast
from ..introspect.tensors import dtype_name, has_class_named
from .dispatch import in_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEVICES = ("cuda", "cpu")


class ForwardWatch:
    """Counts calls of modules that record gradients, while installed. `roots` are the ids of outermost modules, once known."""

    def __init__(self) -> None:
        self.roots: set[int] = set()
        self.autocast: Autocast | None = None
        self.accumulated_in: set[str] = set()
        self._calls: dict[int, list[Any]] = {}  # by module: the module, and how often it was called
        self._handle: Any = None

    def install(self) -> None:
        if self._handle is None:
            self._calls.clear()
            self._handle = register_module_forward_pre_hook(self._called)

    @property
    def called(self) -> bool:
        """Whether a module was called since it was installed."""
        return bool(self._calls)

    def stop(self) -> tuple[int | None, list[nn.Module]]:
        """(micro-batches, modules that were called) since it was installed. Does nothing more until it is installed again."""
        if self._handle is None:
            return None, []
        self._handle.remove()
        self._handle = None
        modules = [module for module, _ in self._calls.values()]
        children = {id(child) for module in modules for child in module.children()}
        counts = [count for module, count in self._calls.values() if id(module) not in children]
        self._calls.clear()
        return (max(counts) if counts else 0), modules

    def _called(self, module: nn.Module, _: Any) -> None:
        # A compiler that traces through this finds nothing here.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_backward():
            return
        entry = self._calls.setdefault(id(module), [module, 0])
        entry[1] += 1
        if entry[1] > 1 and id(module) in self.roots:
            self.accumulated_in.update(dtype_name(gradient) for gradient in _gradients(module))
        if self.autocast is None or not self.autocast.active:
            self.autocast = _autocast()


def _gradients(module: nn.Module) -> Iterator[torch.Tensor]:
    """Where a micro-batch has left gradients for the next to be added to: on the parameters, or in DeepSpeed's own buffers."""
    optimizer: Any = getattr(module, "optimizer", None)
    if has_class_named(optimizer, "BF16_Optimizer"):  # it clears what is on the parameters before each backward pass
        yield from optimizer.fp32_groups_gradients_flat
        return
    for buffers in ("averaged_gradients", "all_grad_tensors"):  # of ZeRO-3; of ZeRO-1 and 2
        for held in (getattr(optimizer, buffers, None) or {}).values():
            yield from (gradient for gradient in held or () if gradient is not None)
    for parameter in module.parameters():
        for gradient in (parameter.grad, getattr(parameter, "grad_accum", None)):
            if gradient is not None:
                yield gradient


def _autocast() -> Autocast:
    for device in _DEVICES:
        if torch.is_autocast_enabled(device):
            return Autocast(active=True, dtype=str(torch.get_autocast_dtype(device)).removeprefix("torch."))
    return Autocast(active=False)
