"""Optional parts of a batch: agreement of all ranks on which are present, and dropping them in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from benchbox.registry.contracts import Batch


def agree_on_presence(batch: Batch, required: Sequence[str], optional: Mapping[str, str]) -> frozenset[str]:
    """Return the optional blocks that are present on at least one rank, using a single all-reduce.

    A rank that skipped a block on its own would run other collectives than the remaining ranks, and hang. Missing fields are
    reported in the same all-reduce. Without optional blocks there is nothing to agree on: no collective runs and nothing is
    read from the device, which would make the host wait for the previous step.

    Args:
        batch: of this rank.
        required: the fields that must be in it, the same on every rank.
        optional: name of a block to the field that masks it. A block is present where its mask is not all False.

    Raises:
        DataError: a field is missing on some rank, with the names of the field and the rank. Raised on every rank; without
            optional blocks only on the rank that lacks the field.
    """
    single = not dist.is_initialized() or dist.get_world_size() == 1
    # A missing field votes with its rank + 1, so that every rank learns the highest rank that lacks it.
    vote = 1 if single else dist.get_rank() + 1
    votes = [0 if field in batch else vote for field in required]
    device = next(iter(batch.values())).device
    if device.type == "meta":  # meta tensors have no values: every optional block counts as present
        votes += [1] * len(optional)
    elif optional:
        empty = torch.zeros((), dtype=torch.bool, device=device)
        present = [batch.get(mask, empty).any() for mask in optional.values()]
        ballot = torch.cat((torch.tensor(votes, device=device), torch.stack([*present, empty]).long()))
        if not single:
            dist.all_reduce(ballot, op=dist.ReduceOp.MAX)
        votes = ballot.tolist()  # the only device synchronisation
    if missing := {field: vote - 1 for field, vote in zip(required, votes, strict=False) if vote}:
        details = "; ".join(f"rank {rank} has no {field!r}" for field, rank in missing.items())
        raise DataError(f"the batch lacks what the policy needs: {details}")
    return frozenset(name for name, vote in zip(optional, votes[len(required) :], strict=False) if vote)


def drop_from_mask(mask: Tensor, uniform: Tensor, probability: float) -> Tensor:
    """Return `mask` (B, ...), all False for samples whose `uniform` (B,) is below the drop probability."""
    return mask & (uniform >= probability).view(-1, *[1] * (mask.ndim - 1))
