"""Floating-point operations of a step, and the utilisation of the device's peak that they give with its time."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from benchbox.observer.hooks.dispatch import is_recomputing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.store.rank_result import Utilisation

# Dense bfloat16 peaks in FLOP/s by the exact device name of the driver, from NVIDIA's data sheets (whose headline numbers, with
# sparsity, are twice as high). Unlisted names have no peak: those of similar names differ by form factor.
DEVICE_PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,  # SXM
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
}


# Fused attention. torch has no formula for that on CPUs, and torch 2.10 refuses query heads that share a key head.
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_FORWARD = frozenset(getattr(torch.ops.aten, name) for name in _ATTENTION)
_BACKWARD = frozenset(getattr(torch.ops.aten, f"{name}_backward") for name in _ATTENTION)


class FlopCounter:
    """Sums torch's formulas for matrix products, convolutions and fused attention, 2 FLOPs for each multiply-add.

    `total` is the work of the device. `recomputed` is the repeated part of it: forward passes for activation checkpointing and
    attention scores in a fused backward. The difference is the work of the model, which does not depend on the set-up.
    """

    def __init__(self) -> None:
        self.total = 0
        self.recomputed = 0

    @staticmethod
    def is_relevant(operation: Any) -> bool:
        """Return whether there is a formula for an operation."""
        packet = getattr(operation, "overloadpacket", operation)
        return packet in _BACKWARD or packet in _FORWARD or packet in flop_registry

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        packet = getattr(operation, "overloadpacket", operation)
        if packet in _BACKWARD:
            shapes = _ungrouped(*(tensor.shape for tensor in args[1:4]))
            flops = int(sdpa_backward_flop_count(args[0].shape, *shapes))  # the gradient of the output is first
            self.recomputed += flops - 2 * int(sdpa_flop_count(*shapes))
        elif packet in _FORWARD:
            flops = int(sdpa_flop_count(*_ungrouped(*(tensor.shape for tensor in args[:3]))))
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        else:
            return
        self.total += flops
        if is_recomputing():
            self.recomputed += flops


def _ungrouped(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> list[Sequence[int]]:
    """Return the shapes (B, H, N, D) of attention in which each query head has a key head of its own: it is the same work."""
    return [query, *((shape[0], query[1], *shape[2:]) for shape in (key, value))]


def utilisation(
    model_flops: int, recomputed_flops: int, step_time_s: Sequence[float], device_name: str, matmul_dtypes: set[str]
) -> Utilisation:
    """Return the record's `mfu`, `hfu` and `mfu_reason`: FLOPs of this rank's step over its median time and the peak.

    MFU counts the FLOPs of the model, HFU all FLOPs of the device (PaLM, arXiv:2204.02311, appendix B). Both are None, with a
    reason, if the peak is unknown or does not apply.
    """
    peak = DEVICE_PEAKS.get(device_name)
    if peak is None:
        return unknown_utilisation(f"no peak is known for {device_name}")
    if not step_time_s:
        return unknown_utilisation("no step was timed")
    if not matmul_dtypes & {"bfloat16", "float16"}:
        return unknown_utilisation(
            f"the known peak is that of 16-bit products, and these ran in {', '.join(sorted(matmul_dtypes)) or 'none'}"
        )
    mfu, hfu = (flops / median(step_time_s) / peak for flops in (model_flops, model_flops + recomputed_flops))
    if hfu > 1.0:
        return unknown_utilisation(f"{hfu:.2f} of the peak is impossible, so the count or the peak is wrong")
    return {"mfu": mfu, "hfu": hfu, "mfu_reason": None}


def unknown_utilisation(reason: str) -> Utilisation:
    """Return the entries of `utilisation` when MFU and HFU are unknown."""
    return {"mfu": None, "hfu": None, "mfu_reason": reason}
