"""What lies where in the flat partitions of ZeRO.

Parameters lie in the order of `param_shapes`: a rank of ZeRO-1 or 2 holds the next run of a group's elements, a rank of ZeRO-3
the same share of every parameter, rounded up.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from benchbox.observer.introspect.names import own_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Shapes = Mapping[str, tuple[int, ...]]


class ParameterSpan(NamedTuple):
    """Elements `start` to `stop` of a partition: those of parameter `name` from its element `begin` on."""

    name: str
    start: int
    stop: int
    begin: int


def runs(group: Shapes, lengths: Sequence[int], rank: int) -> list[ParameterSpan]:
    """A rank's partition of a group in ZeRO-1 and 2, of the lengths that all ranks saved; nothing if they do not add up."""
    total = sum(prod(shape) for shape in group.values())
    # BF16_Optimizer saves its last partition with the padding: less than a partition of it.
    if not total <= sum(lengths) <= total + max(lengths):
        return []
    begin = sum(lengths[:rank])
    return list(_between(group, begin, begin + lengths[rank]))


def _between(group: Shapes, begin: int, end: int) -> Iterator[ParameterSpan]:
    """The parameters whose elements, one after another, lie between two positions."""
    position = 0
    for name, shape in group.items():
        size = prod(shape)
        first, last = max(position, begin), min(position + size, end)
        if first < last:
            yield ParameterSpan(own_name(name), first - begin, last - begin, first - position)
        position += size


def shards(lengths: Sequence[int], rank: int, world: int, shapes: Sequence[Shapes]) -> list[list[ParameterSpan]]:
    """ZeRO-3 splits groups into sub-groups of whole parameters."""
    every = [(name, prod(shape)) for group in shapes for name, shape in group.items()]
    if sum(-(-size // world) for _, size in every) != sum(lengths):
        return [[] for _ in lengths]
    remaining = iter(every)
    places = []
    for length in lengths:
        partition: list[ParameterSpan] = []
        position = 0
        while position < length:
            name, size = next(remaining)
            share = -(-size // world)
            own = min(share, size - rank * share)  # the last ranks' shares end in padding
            if own > 0:
                partition.append(ParameterSpan(own_name(name), position, position + own, rank * share))
            position += share
        places.append(partition)
    return places
