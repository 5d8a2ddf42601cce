"""The rank that writes a part of a checkpoint, of those that hold it: replicas hold the same."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchbox.trainer.checkpoint.state import rank, world_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.dcp.shards import Box, Shards

Part = tuple[str, tuple[int, ...], tuple[int, ...]]  # key of a tensor, offsets, shape


class PartOwners:
    """The parts that this rank writes, agreed upon again whenever ranks hold others than before."""

    def __init__(self) -> None:
        self._part_bytes: dict[Part, int] | None = None
        self._owned: frozenset[Part] = frozenset()

    def owned(self, tensors: Mapping[str, Shards], group: dist.ProcessGroup | None) -> dict[str, Shards]:
        """Return the tensors with the parts that this rank writes, each of which no other rank does. All ranks must call it.

        DCP also writes every part once, and decides that later, of what each rank has copied by then: eight replicas of a
        policy would copy eight times its state to the memory of their host.

        Args:
            tensors: with all parts that this rank holds.
            group: of all ranks, on hosts; None for a single one.
        """
        if group is None:
            return dict(tensors)
        part_bytes = {_part(key, box): box.view.nbytes for key, shards in tensors.items() for box in shards.boxes}
        has_changed = torch.tensor([part_bytes != self._part_bytes], dtype=torch.uint8)
        dist.all_reduce(has_changed, op=dist.ReduceOp.MAX, group=group)
        if has_changed.item():
            everywhere: list[dict[Part, int]] = [{}] * world_size()
            dist.all_gather_object(everywhere, part_bytes, group=group)
            self._part_bytes, self._owned = part_bytes, assign_owners(everywhere)[rank()]
        return {
            key: replace(shards, boxes=tuple(box for box in shards.boxes if _part(key, box) in self._owned))
            for key, shards in tensors.items()
        }


def assign_owners(held: Sequence[Mapping[Part, int]]) -> list[frozenset[Part]]:
    """Return the parts that each rank writes, so that each is written once and ranks write about as many bytes.

    Args:
        held: bytes of the parts that each rank holds.
    """
    holders: defaultdict[Part, list[int]] = defaultdict(list)
    sizes: dict[Part, int] = {}
    for holder, parts in enumerate(held):
        for part, size in parts.items():
            holders[part].append(holder)
            sizes[part] = size
    owned: list[set[Part]] = [set() for _ in held]
    written = [0] * len(held)
    # Those without a choice first, then large ones: small ones even out what is left.
    for part in sorted(sizes, key=lambda part: (len(holders[part]) > 1, -sizes[part], part)):
        owner = min(holders[part], key=lambda holder: (written[holder], holder))
        owned[owner].add(part)
        written[owner] += sizes[part]
    return [frozenset(parts) for parts in owned]


def _part(key: str, box: Box) -> Part:
    return key, box.offsets, tuple(box.view.shape)
