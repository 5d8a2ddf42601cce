"""Sizes of shards with their padding, as the libraries compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_FSDP1_ALIGNMENT_BYTES = 16  # torch.distributed.fsdp._flat_param, with use_orig_params
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes at which DDP closes its buckets by default


def round_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `numel`."""
    return -(-numel // multiple) * multiple


def fsdp1_flat_numel(numels: Iterable[int], shards: int, element_size: int) -> int:
    """Return the elements of a flat parameter: each parameter begins at a multiple of 16 bytes, and all ranks get as many."""
    alignment = _FSDP1_ALIGNMENT_BYTES // element_size
    total = 0
    for numel in numels:
        total = round_up(total, alignment) + numel
    return round_up(total, shards)


def fsdp2_shard_numel(shape: Sequence[int], shards: int) -> int:
    """Return the elements of a rank's shard with padding: whole rows of the first dimension, as `torch.chunk` splits them."""
    rows = -(-shape[0] // shards)
    row = 1
    for size in shape[1:]:
        row *= size
    return rows * row


def zero_group_numel(numels: Iterable[int], shards: int) -> int:
    """Return the elements of a flat group of ZeRO-1 and ZeRO-2, a multiple of 4 bytes in 16 bits for every rank."""
    return round_up(sum(numels), 2 * shards)


def ddp_buckets(sizes: Iterable[int]) -> list[int]:
    """Return the bytes of DDP's buckets for gradients in the order in which they are complete.

    A bucket is closed by the gradient that reaches the limit; the first has a lower one, so that reduction begins early
    (torch.csrc.distributed.c10d.reducer, `compute_bucket_assignment_by_size`).
    """
    buckets: list[int] = []
    current, limit = 0, _FIRST_BUCKET
    for size in sizes:
        current += size
        if current >= limit:
            buckets.append(current)
            current, limit = 0, _BUCKET
    return [*buckets, current] if current else buckets


def zero_buckets(numels: Iterable[int], limit: int) -> list[int]:
    """Return the elements of DeepSpeed's reduction buckets: one that the next gradient would overflow is reduced before it."""
    buckets: list[int] = []
    current = 0
    for numel in numels:
        if current and current + numel > limit:
            buckets.append(current)
            current = 0
        current += numel
    return [*buckets, current] if current else buckets
