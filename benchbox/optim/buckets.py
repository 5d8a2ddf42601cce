"""Steps of an optimizer over masters, one bucket of gradients at a time."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchbox.optim.chunks import Granularity, ParameterChunk, bucket_elements
from benchbox.optim.fused import can_step_fused, fused_step
from benchbox.optim.multi_tensor import copy_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.optim import Optimizer

Bucket = list[tuple[ParameterChunk, Tensor]]  # chunks with their gradients
ScratchBuffers = dict[torch.device, Tensor]


def step_in_buckets(
    inner: Optimizer,
    groups: Sequence[Iterable[ParameterChunk]],
    granularity: Granularity,
    divisor: Tensor | None,
    scratch: ScratchBuffers,
) -> None:
    """Step the chunks that have a gradient and round their masters into the live parameters.

    During each call of `inner.step` the groups of `inner` contain the masters of one bucket only.

    Args:
        groups: the chunks of each parameter group of `inner`.
        divisor: () float32, by which the upcast gradients are divided, or None.
        scratch: buffers for upcast gradients, reused by the next step.
    """
    param_groups = inner.param_groups
    params = [group["params"] for group in param_groups]
    try:
        for buckets in _split_into_buckets(groups, granularity):
            for index, bucket in buckets.items():
                param_groups[index]["params"] = [chunk.master for chunk, _ in bucket]
            inner.param_groups = [param_groups[index] for index in buckets]
            bucket = list(chain(*buckets.values()))
            upcasts = _allocate_upcasts(bucket, None if granularity is Granularity.ALL else scratch)
            _step_bucket(inner, bucket, upcasts, divisor)
    finally:
        inner.param_groups = param_groups
        for group, parameters in zip(param_groups, params, strict=True):
            group["params"] = parameters


def _split_into_buckets(groups: Sequence[Iterable[ParameterChunk]], granularity: Granularity) -> Iterator[dict[int, Bucket]]:
    """Yield, for each call of the optimizer, chunks with their gradients by the index of their group.

    Each yield has one bucket: chunks of one group on one device, of at most `bucket_elements` (a larger chunk is alone). If the
    optimizer may have to see all tensors, there is one yield with one bucket per group.
    """
    with_gradients = {
        index: ((chunk, gradient) for chunk in chunks if (gradient := chunk.gradient()) is not None)
        for index, chunks in enumerate(groups)
    }
    if granularity is Granularity.ALL:
        buckets = {index: list(pairs) for index, pairs in with_gradients.items()}
        if any(buckets.values()):
            yield buckets
        return
    for index, pairs in with_gradients.items():
        for bucket in _limit_size(pairs):
            yield {index: bucket}


def _limit_size(pairs: Iterable[tuple[ParameterChunk, Tensor]]) -> Iterator[Bucket]:
    bucket: Bucket = []
    elements = 0
    for chunk, gradient in pairs:
        device = chunk.master.device
        is_full = elements + chunk.master.numel() > bucket_elements(device)
        if bucket and (is_full or device != bucket[0][0].master.device):
            yield bucket
            bucket, elements = [], 0
        bucket.append((chunk, gradient))
        elements += chunk.master.numel()
    if bucket:
        yield bucket


def _allocate_upcasts(bucket: Bucket, scratch: ScratchBuffers | None) -> list[Tensor]:
    """Return uninitialised float32 tensors for the gradients of a bucket, in the shapes of its masters.

    They are views of one buffer in `scratch`, which is enlarged if necessary. Without `scratch` each has memory of its own.
    """
    if scratch is None:
        return [torch.empty_like(chunk.master) for chunk, _ in bucket]
    device, sizes = bucket[0][0].master.device, [chunk.master.numel() for chunk, _ in bucket]
    buffer = scratch.get(device)
    if buffer is None or buffer.numel() < sum(sizes):
        buffer = scratch[device] = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    parts = buffer[: sum(sizes)].split(sizes)
    return [part.view(chunk.master.shape) for part, (chunk, _) in zip(parts, bucket, strict=True)]


def _step_bucket(inner: Optimizer, bucket: Bucket, upcasts: list[Tensor], divisor: Tensor | None) -> None:
    try:
        copy_tensors(upcasts, [gradient for _, gradient in bucket])
        for (chunk, _), upcast in zip(bucket, upcasts, strict=True):
            chunk.master.grad = upcast
        if divisor is not None:
            divisor = divisor.to(upcasts[0].device)
        if can_step_fused(inner):
            fused_step(inner, divisor)
        else:
            if divisor is not None:
                torch._foreach_div_(upcasts, divisor)
            inner.step()
    finally:
        for chunk, _ in bucket:
            chunk.master.grad = None
    copy_tensors([chunk.live() for chunk, _ in bucket], [chunk.master for chunk, _ in bucket])
