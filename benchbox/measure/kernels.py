"""Which attention kernel ran, which modules were recomputed, and what dtypes matrix products had."""

from __future__ import annotations

from typing import Any, Self

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from benchbox.measure.watch import in_backward

_FUSED = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash_cpu",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


class AttentionKernels:
    """Names the attention that ran: `sdpa:<kernel>` for torch's scaled_dot_product_attention, `eager` for a softmax of its own.

    Several are joined by `+`, fused ones first, as in `sdpa:flash+eager`. torch decomposes its unfused kernel, `math`, into
    plain products and a softmax; it is told from an eager one because the call to scaled_dot_product_attention is seen too.
    """

    def __init__(self) -> None:
        self._fused: set[str] = set()
        self._unfused = self._eager = False
        self._calls = _SdpaCalls(self)
        self._fused_in_call: bool | None = None  # None outside a call
        self.matmul_dtypes: set[str] = set()

    @property
    def name(self) -> str | None:
        """None when no attention ran."""
        kernels = sorted(self._fused) + (["math"] if self._unfused else [])
        parts = [f"sdpa:{kernel}" for kernel in kernels] + (["eager"] if self._eager else [])
        return "+".join(parts) or None

    def __enter__(self) -> Self:
        self._calls.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._calls.__exit__(*exception)

    def saw(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        name = operation.overloadpacket.__name__
        if name in _FUSED:
            self._fused.add(_FUSED[name])
            self._fused_in_call = None if self._fused_in_call is None else True
        elif name == "_softmax" and self._fused_in_call is None:
            self._eager = True
        elif name in _MATMULS:
            self.matmul_dtypes.add(str(arguments[1].dtype).removeprefix("torch."))  # the first may be a bias

    def called(self, function: Any, arguments: Any, options: Any) -> Any:
        """Run one call to scaled_dot_product_attention and note whether a fused kernel served it."""
        self._fused_in_call = False
        try:
            return function(*arguments, **options)
        finally:
            self._unfused |= not self._fused_in_call
            self._fused_in_call = None


class _SdpaCalls(TorchFunctionMode):
    def __init__(self, kernels: AttentionKernels) -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._kernels.called(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


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
