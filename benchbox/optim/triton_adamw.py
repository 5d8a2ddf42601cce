"""AdamW over masters on a GPU in one kernel for all tensors: upcast, clip, step and rounding.

It moves 28 bytes per parameter: it reads a bfloat16 gradient and a float32 master with its two moments, and writes these three
and the bfloat16 weight. Steps of torch over upcast gradients read and write 12 bytes more.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

BLOCK, _WARPS = 1024, 4  # elements and warps of a program: the fastest of six pairs on an H200


class StepRow(NamedTuple):
    """Addresses of what one step of a tensor reads and writes, all of them contiguous, and the number of elements."""

    master: int  # float32
    exp_avg: int  # float32
    exp_avg_sq: int  # float32
    gradient: int  # bfloat16
    live: int  # bfloat16
    step_count: int  # one float32
    size: int


_COLUMNS = tl.constexpr(len(StepRow._fields))
_VECTOR_BYTES = tl.constexpr(16)  # of a thread's largest load; an address read from a table has no alignment that Triton knows


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """Options of a parameter group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def step_adamw(rows: Iterable[StepRow], options: AdamWOptions, divisor: Tensor) -> None:
    """Take one step of AdamW (Loshchilov and Hutter, arXiv:1711.05101), which nothing waits for; it adds 1 to step counts.

    The caller increments the versions of the tensors: only torch's own operations inform autograd.

    Args:
        rows: of tensors on one device, at least one.
        options: of all of them.
        divisor: () float32 on the same device, by which gradients are divided.
    """
    numbers, longest = array("q"), 0
    for row in rows:
        numbers.extend(row)
        longest = max(longest, row.size)
    table = torch.frombuffer(numbers, dtype=torch.int64).view(-1, len(StepRow._fields))
    if divisor.is_cuda:
        table = table.pin_memory().to(divisor.device, non_blocking=True)
    factors = torch.empty((len(table), 2), dtype=torch.float32, device=divisor.device)
    log2_betas = math.log2(options.beta1), math.log2(options.beta2)
    _prepare[(len(table),)](table, factors, options.lr, *log2_betas, num_warps=1)
    _step[(triton.cdiv(longest, BLOCK), len(table))](  # programs beyond the end of a small tensor do nothing
        table,
        factors,
        divisor,
        -options.lr * options.weight_decay,
        1.0 - options.beta1,
        1.0 - options.beta2,
        options.eps,
        block=BLOCK,
        num_warps=_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _prepare(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    table,  # (tensors, columns) int64: `StepRow`
    factors,  # (tensors, 2) float32, written: lr / (1 - beta1^step), sqrt(1 - beta2^step)
    lr,
    log2_beta1: tl.constexpr,
    log2_beta2: tl.constexpr,
):
    index = tl.program_id(0)
    count_ptr = tl.load(table + _COLUMNS * index + 5).to(tl.pointer_type(tl.float32))
    count = tl.load(count_ptr) + 1.0
    tl.store(count_ptr, count)
    # In float64, as torch's kernel: 1 - beta2^step of float32 would lose three digits in the first steps.
    exact_count = count.to(tl.float64)
    step_size = lr / (1.0 - tl.exp2(exact_count * tl.full((), log2_beta1, tl.float64)))
    correction = tl.sqrt(1.0 - tl.exp2(exact_count * tl.full((), log2_beta2, tl.float64)))
    tl.store(factors + 2 * index, step_size.to(tl.float32))
    tl.store(factors + 2 * index + 1, correction.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    table,  # (tensors, columns) int64: `StepRow`
    factors,  # (tensors, 2) float32, from `_prepare`
    divisor,  # () float32
    minus_decay,  # -lr * weight_decay
    one_minus_beta1,
    one_minus_beta2,
    eps,
    block: tl.constexpr,
):
    index = tl.program_id(1)
    start = tl.program_id(0).to(tl.int64) * block
    row = table + _COLUMNS * index
    size = tl.load(row + 6)
    if start >= size:
        return
    master, exp_avg, exp_avg_sq = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    gradient, live = tl.load(row + 3), tl.load(row + 4)
    offsets = start + tl.arange(0, block)
    step_size, correction = tl.load(factors + 2 * index), tl.load(factors + 2 * index + 1)
    numbers = tl.load(divisor), minus_decay, one_minus_beta1, one_minus_beta2, step_size, correction, eps
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


@triton.jit
def _step_block(master, exp_avg, exp_avg_sq, gradient, live, offsets, inside, numbers):  # type: ignore[no-untyped-def]
    divisor, minus_decay, one_minus_beta1, one_minus_beta2, step_size, correction, eps = numbers
    g = tl.div_rn(tl.load(gradient + offsets, inside).to(tl.float32), divisor)
    m = tl.load(exp_avg + offsets, inside)
    v = tl.load(exp_avg_sq + offsets, inside)
    p = tl.load(master + offsets, inside)
    # Written so that no float32 coefficient near 1 occurs: 1 - lr * weight_decay would cut digits off the decay, and all of it
    # below 3e-8. torch's kernel for GPUs computes with float64 coefficients. Division and square root are IEEE's: Triton's own
    # are approximate.
    m = tl.fma(one_minus_beta1, g - m, m)
    v = tl.fma(one_minus_beta2, g * g - v, v)
    denominator = tl.div_rn(tl.sqrt_rn(v), correction) + eps
    p = tl.fma(minus_decay, p, p) - tl.div_rn(step_size * m, denominator)
    tl.store(exp_avg + offsets, m, inside)
    tl.store(exp_avg_sq + offsets, v, inside)
    tl.store(master + offsets, p, inside)
    # To the nearest bfloat16, ties to even. A conversion does the same on a GPU, but cuts digits off in the interpreter.
    bits = p.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    tl.store(live + offsets, tl.where(p == p, nearest, 0x7FFF).to(tl.uint16), inside)
