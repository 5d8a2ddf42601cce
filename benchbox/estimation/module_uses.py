"""Uses of modules in forward and backward, where DeepSpeed's ZeRO-3 sees them.

Its hooks put an identity function on every tensor that a module is given or returns, directly or in a list, a tuple or a
dictionary, and take the backward of these functions for that of the module. Which uses they miss is part of what ZeRO-3 does,
so the functions here are in the same places (deepspeed.runtime.zero.parameter_offload of DeepSpeed 0.19.8).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchbox.observer.hooks.dispatch import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from benchbox.theory.structure import UseKind


class ModuleUses:
    """Recorder of the uses of modules while `recording`.

    Args:
        names: of every module.
        numbers: of every parameter.
        record: is called with each use and the name of its module.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        numbers: Mapping[nn.Parameter, int],
        record: Callable[[UseKind, str], None],
    ) -> None:
        self._names, self._numbers, self._record = names, numbers, record
        self._pending: dict[nn.Module, int] = {}  # inputs of the last call whose gradients are to come
        self._called: list[nn.Module] = []  # and not returned
        self._own = {module: {numbers[parameter] for parameter in module.parameters(recurse=False)} for module in names}
        self._external: dict[nn.Module, set[int]] = {module: set() for module in names}

    @property
    def external(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the parameters that a module reads from modules that are not called within it, for those that do."""
        return {self._names[module]: tuple(sorted(numbers)) for module, numbers in self._external.items() if numbers}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record until the block ends."""
        handles: list[Any] = []
        try:
            for module in self._names:
                handles.append(module.register_forward_pre_hook(self._call))
                handles.append(module.register_forward_hook(self._return))
                # where DeepSpeed watches them too
                module._parameters = _WatchedParameters(module._parameters, self._read)  # noqa: SLF001
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in self._names:
                module._parameters = dict(module._parameters)  # noqa: SLF001

    def _call(self, module: nn.Module, inputs: Any) -> Any:
        self._called.append(module)
        self._record("call", self._names[module])
        self._pending[module] = 0
        return _map_tensors(lambda tensor: self._watch_input(tensor, module), inputs)

    def _watch_input(self, tensor: Tensor, module: nn.Module) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        self._pending[module] += 1
        watched: Tensor = _BackwardHook.apply(tensor, lambda: self._end_backward(module))
        return watched

    def _end_backward(self, module: nn.Module) -> None:
        # counted over all calls of the module, of which each begins anew
        self._pending[module] -= 1
        if self._pending[module] == 0:
            self._record("return_backward", self._names[module])

    def _return(self, module: nn.Module, _: Any, outputs: Any) -> Any:
        self._called.pop()
        name = self._names[module]
        self._record("return", name)
        return _map_tensors(lambda tensor: _BackwardHook.apply(tensor, lambda: self._record("call_backward", name)), outputs)

    def _read(self, parameter: nn.Parameter) -> None:
        """Note a parameter that the current module reads, and that no module which is being called has."""
        if not self._called or in_backward():
            return
        number = self._numbers[parameter]
        if not any(number in self._own[module] or number in self._external[module] for module in self._called):
            self._external[self._called[-1]].add(number)


class _WatchedParameters(dict[str, "nn.Parameter | None"]):
    """Parameters of a module that tell when one is read by its name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], read: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._read(parameter)
        return parameter


class _BackwardHook(torch.autograd.Function):
    """Identity that calls a function before its gradient goes on."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, hook: Callable[[], None]) -> Tensor:
        ctx.hook = hook
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.hook()
        return gradient, None


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with a function applied to its tensors; what a dictionary contains is replaced in place."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        mapped = [_map_tensors(function, element) for element in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        for key in value:
            value[key] = _map_tensors(function, value[key])
    return value
