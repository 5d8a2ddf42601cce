"""Dtypes that matrix products of the forward pass really run in."""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import in_backward, operation_name

_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "mkldnn_linear", "linear"})


class MatmulDtypes:
    """Counts matrix products and convolutions of the forward pass by the dtype of their operands.

    `totals` maps a dtype to the number of products, and to the elements and bytes of their results. `with_gradient` maps it to
    the number of those that record gradients, also where they are recomputed in the backward pass: with torch's older kind of
    activation checkpointing, only there.
    """

    def __init__(self) -> None:
        self.totals: dict[str, list[int]] = {}
        self.with_gradient: dict[str, int] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Number of products by dtype."""
        return {dtype: count for dtype, (count, _, _) in self.totals.items()}

    @staticmethod
    def is_relevant(operation: Any) -> bool:
        """Return whether an operation is a matrix product or a convolution."""
        return operation_name(operation) in _MATMULS

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        operand = args[1]  # the first argument may be a bias
        dtype = str(operand.dtype).removeprefix("torch.")
        if torch.is_grad_enabled():
            self.with_gradient[dtype] = self.with_gradient.get(dtype, 0) + 1
        if not in_backward():
            total = self.totals.setdefault(dtype, [0, 0, 0])
            for index, amount in enumerate((1, result.numel(), result.numel() * result.element_size())):
                total[index] += amount
