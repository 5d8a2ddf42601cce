"""What dtypes matrix products really have."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .watch import in_backward

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "mkldnn_linear", "linear"})


class ProductDtypes:
    """Counts matrix products and convolutions of the forward pass by the dtype of the weight or right factor."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()

    def saw(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        if operation.overloadpacket.__name__ in _PRODUCTS and not in_backward():
            self.forward[str(arguments[1].dtype).removeprefix("torch.")] += 1
