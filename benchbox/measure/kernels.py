"""Attention kernels that ran, and modules that were recomputed."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from benchbox.observer.hooks.dispatch import in_backward, operation_name
from benchbox.observer.introspect.names import unwrapped_modules

if TYPE_CHECKING:
    from torch import nn

_SDPA = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash_cpu",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
    # torch decomposes its unfused kernel into matrix products and this softmax, which nothing else uses
    "_safe_softmax": "math",
}
_EAGER = "_softmax"
_FLEX = "flex_attention"
# A compiled kernel is no operation: `attend` marks its call with a profiler annotation.
_ANNOTATION = "_record_function_enter_new"


class CallSite:
    """Names the module whose forward runs, while its with block lasts: `layers.*.attention` for every layer of a list."""

    def __init__(self, model: nn.Module) -> None:
        names = {id(module): name for name, module in unwrapped_modules(model)}
        self._names = {module: re.sub(r"\.\d+(?=\.|$)", ".*", name) or "policy" for module, name in names.items()}
        self._running: list[int] = []  # ids of modules, innermost last

    @property
    def name(self) -> str | None:
        """Name of the innermost module; None outside of forward, where a module may recompute a part of itself."""
        return self._names.get(self._running[-1]) if self._running else None

    def __enter__(self) -> Self:
        # Checkpointing ends a recomputation early by an exception.
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    # Modules inside a compiled graph do not run: torch.compile traces their hooks.

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            self._running.append(id(module))

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while self._running and self._running.pop() != id(module):
            pass


class KernelNames:
    """Collects the names of the attention kernels that ran, and the call sites of each.

    They are `sdpa:<kernel>` for torch's scaled_dot_product_attention, `flex` for FlexAttention and `eager` for a plain softmax;
    several are joined by `+`, as in `sdpa:flash+eager`.
    """

    def __init__(self, call_site: CallSite) -> None:
        self._call_site = call_site
        self._kernels: set[str] = set()
        self._kernels_by_site: dict[str, set[str]] = {}

    @property
    def attention(self) -> str | None:
        """Names of the kernels that ran, or None."""
        return "+".join(sorted(self._kernels, key=_kernel_order)) or None

    @property
    def sites(self) -> dict[str, list[str]]:
        """Names of the kernels that ran at each call site."""
        return {site: sorted(kernels, key=_kernel_order) for site, kernels in sorted(self._kernels_by_site.items())}

    @staticmethod
    def is_relevant(operation: Any) -> bool:
        """Return whether an operation may be an attention kernel."""
        return operation_name(operation) in (*_SDPA, _EAGER, _FLEX, _ANNOTATION)

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        name = operation_name(operation)
        if name in _SDPA:
            kernel = f"sdpa:{_SDPA[name]}"
        elif name == _EAGER:
            kernel = "eager"
        elif name == _FLEX or (name == _ANNOTATION and args[0] == _FLEX):
            kernel = "flex"
        else:
            return
        self._kernels.add(kernel)
        if (site := self._call_site.name) is not None:
            self._kernels_by_site.setdefault(site, set()).add(kernel)


def _kernel_order(kernel: str) -> tuple[int, str]:
    return (("sdpa", "flex", "eager").index(kernel.split(":")[0]), kernel)


class Recomputation:
    """Counts the units in which a module ran its forward again during the backward pass, as checkpointed units do."""

    def __init__(self, model: nn.Module, unit_classes: tuple[type[nn.Module], ...]) -> None:
        units = [module for module in model.modules() if isinstance(module, unit_classes)]
        self._compiled = [unit for unit in units if "block" in vars(unit)]  # their modules run inside a graph
        self._units_by_module: dict[int, set[int]] = {}
        for unit in units:
            for module in unit.modules():
                self._units_by_module.setdefault(id(module), set()).add(id(unit))
        self._recomputed: set[int] = set()
        self._blocks: list[tuple[Any, Any]] = []

    @property
    def units(self) -> int:
        return len(self._recomputed)

    def __enter__(self) -> Self:
        self._handle = register_module_forward_pre_hook(self._before_forward)
        self._blocks = [(unit, unit.block) for unit in self._compiled]
        for unit, block in self._blocks:
            unit.block = partial(self._run_block, unit, block)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()
        for unit, block in self._blocks:
            unit.block = block

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and in_backward():
            self._recomputed |= self._units_by_module.get(id(module), set())

    def _run_block(self, unit: Any, block: Any, *args: Any) -> Any:
        if in_backward():
            self._recomputed.add(id(unit))
        return block(*args)
