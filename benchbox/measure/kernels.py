"""Attention kernels that ran, and modules that were recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from torch.nn.modules.module import register_module_forward_pre_hook

from benchbox.observer.hooks.dispatch import in_backward, operation_name

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


class KernelNames:
    """Collects the names of the attention kernels that ran.

    They are `sdpa:<kernel>` for torch's scaled_dot_product_attention, `flex` for FlexAttention and `eager` for a plain softmax;
    several are joined by `+`, as in `sdpa:flash+eager`.
    """

    def __init__(self) -> None:
        self._sdpa: set[str] = set()
        self._eager = self._flex = False

    @property
    def attention(self) -> str | None:
        """Names of the kernels that ran, or None."""
        parts = [f"sdpa:{kernel}" for kernel in sorted(self._sdpa)]
        parts += [name for name, ran in (("flex", self._flex), ("eager", self._eager)) if ran]
        return "+".join(parts) or None

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        name = operation_name(operation)
        if name in _SDPA:
            self._sdpa.add(_SDPA[name])
        elif name == _EAGER:
            self._eager = True
        elif name == _FLEX or (name == _ANNOTATION and args[0] == _FLEX):
            self._flex = True


class Recomputation:
    """Counts the units in which a module ran its forward again during the backward pass, as checkpointed units do."""

    def __init__(self, model: nn.Module, unit_classes: tuple[type[nn.Module], ...]) -> None:
        units = [module for module in model.modules() if isinstance(module, unit_classes)]
        self._units_by_module: dict[int, set[int]] = {}
        for unit in units:
            for module in unit.modules():
                self._units_by_module.setdefault(id(module), set()).add(id(unit))
        self._recomputed: set[int] = set()

    @property
    def units(self) -> int:
        return len(self._recomputed)

    def __enter__(self) -> Self:
        self._handle = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if in_backward():
            self._recomputed |= self._units_by_module.get(id(module), set())
