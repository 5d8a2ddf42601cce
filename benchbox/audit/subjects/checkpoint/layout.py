"""Layout of the flat partitions of ZeRO.

Parameters are laid out in the order of `param_shapes`: a rank of ZeRO-1 or 2 has the next consecutive elements of a group, a
rank of ZeRO-3 an equal share of every parameter, rounded up.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from benchbox.observer.introspect.names import unwrapped_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Shapes = Mapping[str, tuple[int, ...]]


class ParameterSpan(NamedTuple):
    """Elements `start` to `stop` of a partition; they are those of parameter `name` from its element `offset` on."""

    name: str
    start: int
    stop: int
    offset: int


def partition_spans(group: Shapes, lengths: Sequence[int], rank: int) -> list[ParameterSpan]:
    """Return the spans in a rank's partition of a group in ZeRO-1 and 2.

    Args:
        group: the shapes of its parameters.
        lengths: of the partitions that all ranks saved; if they do not add up to the group, the layout is unknown and empty.
        rank: of the partition.
    """
    total = sum(prod(shape) for shape in group.values())
    # BF16_Optimizer saves its last partition with the padding, which is shorter than a partition.
    if not total <= sum(lengths) <= total + max(lengths):
        return []
    start = sum(lengths[:rank])
    return list(_spans_between(group, start, start + lengths[rank]))


def _spans_between(group: Shapes, start: int, stop: int) -> Iterator[ParameterSpan]:
    """Yield the parameters whose elements, concatenated, overlap `start` to `stop`."""
    position = 0
    for name, shape in group.items():
        size = prod(shape)
        overlap_start, overlap_stop = max(position, start), min(position + size, stop)
        if overlap_start < overlap_stop:
            yield ParameterSpan(unwrapped_name(name), overlap_start - start, overlap_stop - start, overlap_start - position)
        position += size


def zero3_spans(lengths: Sequence[int], rank: int, world_size: int, shapes: Sequence[Shapes]) -> list[list[ParameterSpan]]:
    """Return the spans in each partition of a rank in ZeRO-3, which splits groups into sub-groups of entire parameters."""
    sizes = [(name, prod(shape)) for group in shapes for name, shape in group.items()]
    if sum(-(-size // world_size) for _, size in sizes) != sum(lengths):
        return [[] for _ in lengths]
    remaining = iter(sizes)
    partitions = []
    for length in lengths:
        spans: list[ParameterSpan] = []
        position = 0
        while position < length:
            name, size = next(remaining)
            share = -(-size // world_size)
            unpadded = min(share, size - rank * share)  # the last ranks' shares end in padding
            if unpadded > 0:
                spans.append(ParameterSpan(unwrapped_name(name), position, position + unpadded, rank * share))
            position += share
        partitions.append(spans)
    return partitions
