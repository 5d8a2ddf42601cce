"""Floating-point operations of a step, and the share of the device's peak they make of its time."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from benchbox.observer.hooks.dispatch import is_recomputing

if TYPE_CHECKING:
    from collections.abc import Sequence

# Dense bfloat16 peaks in FLOP/s by the exact name the driver gives, from NVIDIA's data sheets (which headline twice as much,
# with sparsity). An unlisted name has no peak: a near match would be wrong by the difference between two form factors.
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


# Fused attention on CPU has no formula in torch.
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_BACKWARD = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    )
)


class FlopCounter:
    """Adds up torch's formulas for matrix products, convolutions and fused attention, 2 for each multiply-add.

    `total` is what the device did; `recomputed` is the part of it that did something again: a forward, for activation
    checkpointing, or the scores of attention, in a fused backward. The rest is the model's work, whatever the set-up.
    """

    def __init__(self) -> None:
        self.total = 0
        self.recomputed = 0

    def on_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        packet = getattr(operation, "overloadpacket", operation)
        if packet in _BACKWARD:
            shapes = [tensor.shape for tensor in arguments[:4]]  # of the output's gradient, query, key, value
            flops = int(sdpa_backward_flop_count(*shapes))
            self.recomputed += flops - 2 * int(sdpa_flop_count(*shapes[1:]))
        elif packet is _FORWARD:
            flops = int(sdpa_flop_count(*(tensor.shape for tensor in arguments[:3])))
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*arguments, **options, out_val=result))
        else:
            return
        self.total += flops
        if is_recomputing():
            self.recomputed += flops


def utilisation(
    model_flops: int, recomputed_flops: int, step_time_s: Sequence[float], device_name: str, matmul_dtypes: set[str]
) -> dict[str, Any]:
    """The record's `mfu`, `hfu` and `mfu_reason`: FLOPs of this rank's step over its median time, as a share of the peak.

    The model's FLOPs, and all that the device did (PaLM, arXiv:2204.02311, appendix B). Null with a reason where the peak is
    unknown, and where it would not apply.
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


def unknown_utilisation(reason: str) -> dict[str, Any]:
    """The same where neither can be known."""
    return {"mfu": None, "hfu": None, "mfu_reason": reason}
