"""Which parts of a batch are there, decided for all ranks at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from benchbox.registry.contracts import Batch


def require(batch: Batch, needed: Sequence[str], optional: Mapping[str, str]) -> frozenset[str]:
    """Which optional blocks some rank has anything of. One all-reduce carries every decision.

    A rank that left out a block by itself would reach other collectives than the rest, and hang. So would a rank that raised by
    itself because its batch lacks a field: what is missing travels in the same all-reduce.

    Args:
        batch: of this rank.
        needed: the fields it must have, the same on every rank.
        optional: name of a block to the field that masks it. A block is there where its mask is not all False.

    Raises:
        DataError: a field is missing on some rank: raised on every rank, with the names of field and rank.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    # A missing field votes with its rank, so that the highest such rank is known to all.
    vote = 1 if alone else dist.get_rank() + 1
    votes = [0 if field in batch else vote for field in needed]
    device = next(iter(batch.values())).device
    if device.type == "meta":  # nothing to look at: everything counts as there
        votes += [1] * len(optional)
    elif optional or not alone:
        empty = torch.zeros((), dtype=torch.bool, device=device)
        there = [batch.get(mask, empty).any() for mask in optional.values()]
        ballot = torch.cat((torch.tensor(votes, device=device), torch.stack([*there, empty]).long()))
        if not alone:
            dist.all_reduce(ballot, op=dist.ReduceOp.MAX)
        votes = ballot.tolist()  # the device is waited for once
    if lacking := {field: vote - 1 for field, vote in zip(needed, votes, strict=False) if vote}:
        where = "; ".join(f"rank {rank} has no {field!r}" for field, rank in lacking.items())
        raise DataError(f"the batch lacks what the policy needs: {where}")
    return frozenset(name for name, vote in zip(optional, votes[len(needed) :], strict=False) if vote)


def kept(mask: Tensor, uniform: Tensor, drop: float) -> Tensor:
    """`mask` (B, ...), all False for those samples whose `uniform` (B,) lies below the drop probability."""
    return mask & (uniform >= drop).view(-1, *[1] * (mask.ndim - 1))
