"""Distance of a piece of work from the measured peaks of its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.store.peaks import MeasuredPeaks

_NEAR = 0.01  # share of a peak below which work is not near to it


class Attainment(TypedDict):
    """Rates of a piece of work, and their shares of the measured peaks. A share that is null has a reason."""

    flops: int | None
    flops_per_s: float | None
    of_peak: float | None  # of the highest rate of products in the same dtypes
    of_shapes: float | None  # of the rates of products in the same dtypes and classes of shape
    flops_reason: str | None
    bytes: int | None
    bytes_per_s: float | None
    of_memory: float | None  # of the highest rate of copies and updates in place
    bytes_reason: str | None
    bound: Literal["compute", "bytes"] | None  # the peak that it is nearer to; null where it is near to none, or bytes are


def attainment(
    seconds: float,
    flops: Mapping[tuple[str, str], int] | None,
    size: int | None,
    peaks: MeasuredPeaks | None,
    missing: str | None = None,
    bytes_missing: str | None = None,
) -> Attainment:
    """Return the rates of work that took `seconds`, and their shares of the peaks.

    Args:
        seconds: of the work; more than 0.
        flops: by dtype and class of shape; None if they are not known.
        size: bytes that its operations read and write; None if they are not known.
        peaks: of the device; None if they were not measured.
        missing: why FLOPs or peaks are not known.
        bytes_missing: why bytes are not known.
    """
    total = None if flops is None else sum(flops.values())
    of_peak, of_shapes, flops_reason = _shares_of_products(seconds, flops, peaks, missing)
    of_memory, bytes_reason = (None, bytes_missing) if size is None else _share_of_memory(seconds, size, peaks, missing)
    bound: Literal["compute", "bytes"] | None = None
    if size is not None and max(of_peak or 0.0, of_memory or 0.0) >= _NEAR:
        # Bytes above the rate of memory come from caches, and are no bound.
        bound = "compute" if of_peak is not None and (of_memory is None or of_peak >= of_memory) else "bytes"
    return {
        "flops": total,
        "flops_per_s": None if total is None else total / seconds,
        "of_peak": of_peak,
        "of_shapes": of_shapes,
        "flops_reason": flops_reason,
        "bytes": size,
        "bytes_per_s": None if size is None else size / seconds,
        "of_memory": of_memory,
        "bytes_reason": bytes_reason,
        "bound": bound,
    }


def describe_shares(products: Mapping[str, str], optimizer: str | None, of_products: str = "", of_memory: str = "") -> str:
    """Say at what share of the measured peaks phases run; nothing where no share is known.

    Args:
        products: share of each phase with products, as text, by the subject of the sentence.
        optimizer: that of the optimizer.
        of_products, of_memory: what is said of each peak, behind a space.
    """
    shares = [f"{subject} at {share}" for subject, share in products.items()]
    parts = [f"{' and '.join(shares)} of what this device can do in products{of_products}"] if shares else []
    if optimizer is not None:
        parts.append(f"the optimizer at {optimizer} of what its memory can do{of_memory}")
    if not parts:
        return ""
    subject, _, rest = ", ".join(parts).partition(" at ")
    return f"{subject} {'run' if ' and ' in subject else 'runs'} at {rest}"


def _shares_of_products(
    seconds: float, flops: Mapping[tuple[str, str], int] | None, peaks: MeasuredPeaks | None, missing: str | None
) -> tuple[float | None, float | None, str | None]:
    """Return the shares of the highest rate and of the rate for these shapes, and the reason where the former is unknown."""
    if flops is None or peaks is None:
        return None, None, missing
    if not any(flops.values()):
        return None, None, "no products"
    least_s = least_by_shape_s = 0.0
    for (dtype, shape), amount in flops.items():
        best = peaks.best_matmul(dtype)
        if best is None:
            return None, None, f"the peaks have no products in {dtype}"
        least_s += amount / best["per_s"]
        of_shape = peaks.matmul[dtype].get(shape)
        least_by_shape_s += amount / (of_shape or best)["per_s"]
    if least_s > seconds:
        reason = f"{least_s / seconds:.2f} of the peak is impossible: measure the peaks again on a quiet machine"
        return None, None, reason
    if least_by_shape_s > seconds:  # of each class one shape was measured, and others are faster
        return least_s / seconds, None, "products of these shapes are faster than the measured ones of their classes"
    return least_s / seconds, least_by_shape_s / seconds, None


def _share_of_memory(
    seconds: float, size: int, peaks: MeasuredPeaks | None, missing: str | None
) -> tuple[float | None, str | None]:
    if peaks is None:
        return None, missing
    share = size / seconds / peaks.best_memory["per_s"]
    if share > 1:
        return None, f"{share:.2f} of the rate of memory: operations find their operands in caches"
    return share, None
