"""AdamW over masters on a GPU in one kernel for all tensors: upcast, clip, step and rounding.

It moves 28 bytes per parameter: it reads a bfloat16 gradient and a float32 master with its two moments, and writes these three
and the bfloat16 weight. Steps of torch over upcast gradients read and write 12 bytes more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 2048  # elements of one program

# master, exp_avg, exp_avg_sq, gradient, live weight
StepTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_ROW = tl.constexpr(5)  # of the table of addresses
_VECTOR_BYTES = tl.constexpr(16)  # of a thread's largest load; an address read from a table has no alignment that Triton knows


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """Options of a parameter group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def step_adamw(tensors: Sequence[StepTensors], step_counts: Sequence[Tensor], options: AdamWOptions, divisor: Tensor) -> None:
    """Take one step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) for tensors on one device, which nothing waits for.

    Args:
        tensors: contiguous and of one shape in each tuple: float32 masters and moments, bfloat16 gradients and live weights.
        step_counts: () float32 on the same device, of each tuple, this step included.
        divisor: () float32 on the same device, by which gradients are divided.
    """
    device = tensors[0][0].device
    sizes = [master.numel() for master, *_ in tensors]
    addresses = _to_device([[tensor.data_ptr() for tensor in row] for row in tensors], device)
    # In float64, as torch's kernel: 1 - beta2^step of float32 would lose three digits in the first steps.
    counts = torch.stack(list(step_counts)).double()
    step_sizes = (options.lr / (1.0 - options.beta1**counts)).float()
    corrections = (1.0 - options.beta2**counts).sqrt().float()
    _step[(len(tensors), triton.cdiv(max(sizes), BLOCK))](  # programs beyond the end of a small tensor do nothing
        addresses,
        _to_device(sizes, device),
        step_sizes,
        corrections,
        divisor,
        1.0 - options.lr * options.weight_decay,
        1.0 - options.beta1,
        options.beta2,
        1.0 - options.beta2,
        options.eps,
        block=BLOCK,
    )
    # Autograd refuses a backward pass over weights written since the forward pass, but only torch's own operations inform it.
    for master, exp_avg, exp_avg_sq, _, live in tensors:
        torch.autograd.graph.increment_version((master, exp_avg, exp_avg_sq, live))


def _to_device(numbers: Any, device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    addresses,  # (tensors, 5) int64
    sizes,  # (tensors,) int64
    step_sizes,  # (tensors,) float32: lr / (1 - beta1^step)
    corrections,  # (tensors,) float32: sqrt(1 - beta2^step)
    divisor,  # () float32
    decay,  # 1 - lr * weight_decay
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    block: tl.constexpr,
):
    index = tl.program_id(0)
    start = tl.program_id(1).to(tl.int64) * block
    size = tl.load(sizes + index)
    if start >= size:
        return
    row = addresses + _ROW * index
    master, exp_avg, exp_avg_sq = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    gradient, live = tl.load(row + 3), tl.load(row + 4)
    offsets = start + tl.arange(0, block)
    numbers = (
        tl.load(divisor), decay, one_minus_beta1, beta2, one_minus_beta2, tl.load(corrections + index), eps,
        tl.load(step_sizes + index),
    )  # fmt: skip
    if ((master | exp_avg | exp_avg_sq | gradient | live) % _VECTOR_BYTES == 0) & (start + block <= size):
        _step_block(  # with loads and stores of whole vectors
            tl.multiple_of(master.to(tl.pointer_type(tl.float32)), _VECTOR_BYTES),
            tl.multiple_of(exp_avg.to(tl.pointer_type(tl.float32)), _VECTOR_BYTES),
            tl.multiple_of(exp_avg_sq.to(tl.pointer_type(tl.float32)), _VECTOR_BYTES),
            tl.multiple_of(gradient.to(tl.pointer_type(tl.bfloat16)), _VECTOR_BYTES),
            tl.multiple_of(live.to(tl.pointer_type(tl.uint16)), _VECTOR_BYTES),
            offsets,
            None,
            numbers,
        )
    else:
        _step_block(
            master.to(tl.pointer_type(tl.float32)),
            exp_avg.to(tl.pointer_type(tl.float32)),
            exp_avg_sq.to(tl.pointer_type(tl.float32)),
            gradient.to(tl.pointer_type(tl.bfloat16)),
            live.to(tl.pointer_type(tl.uint16)),
            offsets,
            offsets < size,
            numbers,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _step_block(master, exp_avg, exp_avg_sq, gradient, live, offsets, inside, numbers):  # type: ignore[no-untyped-def]
    divisor, decay, one_minus_beta1, beta2, one_minus_beta2, correction, eps, step_size = numbers
    # The order of operations is that of torch's fused kernel, with IEEE division and square root: Triton's own are approximate.
    g = tl.div_rn(tl.load(gradient + offsets, inside).to(tl.float32), divisor)
    m = tl.load(exp_avg + offsets, inside)
    v = tl.load(exp_avg_sq + offsets, inside)
    p = tl.load(master + offsets, inside)
    m = tl.fma(one_minus_beta1, g - m, m)
    v = tl.fma(one_minus_beta2 * g, g, v * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(v), correction) + eps
    p = p * decay - tl.div_rn(step_size * m, denominator)
    tl.store(exp_avg + offsets, m, inside)
    tl.store(exp_avg_sq + offsets, v, inside)
    tl.store(master + offsets, p, inside)
    # To the nearest bfloat16, ties to even. A conversion does the same on a GPU, but cuts digits off in the interpreter.
    bits = p.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    tl.store(live + offsets, tl.where(p == p, nearest, 0x7FFF).to(tl.uint16), inside)
