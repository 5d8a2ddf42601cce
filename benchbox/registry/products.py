"""Classes of matrix products by shape: a device reaches another rate in each of them."""

from __future__ import annotations

from typing import Literal

ShapeClass = Literal["large", "thin", "batched"]

SHAPE_CLASSES: dict[ShapeClass, str] = {
    "large": "one product whose three sizes are all 512 or more",
    "thin": "one product with a size below 512, such as the projection of few tokens",
    "batched": "many products in one call, such as the scores of attention heads",
}
_LARGE = 512


def shape_class(rows: int, columns: int, inner: int) -> ShapeClass:
    """Return the class of one product of (rows, inner) with (inner, columns)."""
    return "large" if min(rows, columns, inner) >= _LARGE else "thin"
