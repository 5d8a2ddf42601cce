"""Which attention kernel ran, and which modules were recomputed."""

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
    # torch decomposes its unfused kernel into plain products and this softmax, which nothing else uses
    "_safe_softmax": "math",
}
_EAGER = "_softmax"
_FLEX = "flex_attention"
# A compiled kernel is no operation: `attend` marks the call, as for a profiler.
_MARK = "_record_function_enter_new"


class KernelNames:
    """Names the attention that ran: `sdpa:<kernel>` for torch's scaled_dot_product_attention, `flex` for FlexAttention and
    `eager` for a softmax of its own; several are joined by `+`, as in `sdpa:flash+eager`.
    """

    def __init__(self) -> None:
        self._sdpa: set[str] = set()
        self._eager = self._flex = False

    @property
    def attention(self) -> str | None:
        """None when no attention ran."""
        parts = [f"sdpa:{kernel}" for kernel in sorted(self._sdpa)]
        parts += [name for name, ran in (("flex", self._flex), ("eager", self._eager)) if ran]
        return "+".join(parts) or None

    def on_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        name = operation_name(operation)
        if name in _SDPA:
            self._sdpa.add(_SDPA[name])
        elif name == _EAGER:
            self._eager = True
        elif name == _FLEX or (name == _MARK and arguments[0] == _FLEX):
            self._flex = True


class Recomputation:
    """Counts the units of which some part ran its forward again during the backward pass: those really checkpointed."""

    def __init__(self, model: nn.Module, unit_classes: tuple[type[nn.Module], ...]) -> None:
        units = [module for module in model.modules() if isinstance(module, unit_classes)]
        self._units_of: dict[int, set[int]] = {}
        for unit in units:
            for part in unit.modules():
                self._units_of.setdefault(id(part), set()).add(id(unit))
        self._repeated: set[int] = set()

    @property
    def units(self) -> int:
        return len(self._repeated)

    def __enter__(self) -> Self:
        self._handle = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if in_backward():
            self._repeated |= self._units_of.get(id(module), set())
