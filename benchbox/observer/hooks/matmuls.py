"""What dtypes matrix products really have."""

from __future__ import annotations

from typing import Any

from .dispatch import in_backward, operation_name

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "mkldnn_linear", "linear"})


class MatmulDtypes:
    """Counts matrix products and convolutions of the forward pass by the dtype they multiply.

    `seen` maps a dtype to the number of products, and the elements and bytes of their results.
    """

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    @property
    def forward(self) -> dict[str, int]:
        """Products by dtype."""
        return {dtype: count for dtype, (count, _, _) in self.seen.items()}

    def on_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        if operation_name(operation) in _PRODUCTS and not in_backward():
            factor = arguments[1]  # the first may be a bias
            sums = self.seen.setdefault(str(factor.dtype).removeprefix("torch."), [0, 0, 0])
            for place, amount in enumerate((1, result.numel(), result.numel() * result.element_size())):
                sums[place] += amount
