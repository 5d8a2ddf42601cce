"""The table that ranks exchange in validation: losses and provenance of samples in one tensor, so in one collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from benchbox.registry.contracts import Batch, Losses

PROVENANCE = ("dataset_index", "source_index", "control_mode_index")
LEADING = ("counts", *PROVENANCE, "loss")  # columns before those of the terms


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Layout of the table of a batch: a row per sample, and a vector of sums over the batch.

    The columns of a row are 1 for a sample that counts, its provenance, its loss, and (sum, count) of every term. The vector
    is the number of samples, the sum of their losses, and for each part of the losses that is not a term the sum of its values
    and the number of samples that have it. A policy without losses per sample has no rows.

    Args:
        rows: of every rank, at least the samples of its largest batch.
    """

    terms: tuple[str, ...]
    parts: tuple[str, ...]
    rows: int

    @classmethod
    def of(cls, losses: Losses, rows: int) -> SampleTable:
        """Return the layout for the losses of a policy, the same on every rank."""
        terms = losses.per_sample or {}
        return cls(tuple(terms), tuple(name for name in losses.parts if name not in terms), rows if terms else 0)

    @property
    def columns(self) -> int:
        return len(LEADING) + 2 * len(self.terms)

    def pack(self, losses: Losses, batch: Batch, *, counts: bool) -> Tensor:
        """Return the table of a batch as one vector, float64: it holds a float32 and a number of a dataset exactly.

        Args:
            counts: whether the samples count. If not, all values are 0.
        """
        device = losses.total.device
        rows = torch.zeros(self.rows, self.columns, dtype=torch.float64, device=device)
        sums = torch.zeros(2 + 2 * len(self.parts), dtype=torch.float64, device=device)
        if counts:
            samples = len(batch["frame_index"])
            if self.rows:
                rows[:samples] = self._sample_rows(losses, batch)
            sums[0], sums[1] = samples, losses.total.double() * samples
            for column, name in enumerate(self.parts):
                count = None if losses.counts is None else losses.counts.get(name)
                number = torch.tensor(float(samples)) if count is None else count
                sums[2 + 2 * column], sums[3 + 2 * column] = losses.parts[name].double() * number, number
        return torch.cat((rows.flatten(), sums))

    def unpack(self, gathered: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows (samples that count, columns) of all ranks, and the sums of their vectors, from (ranks, size)."""
        rows, sums = gathered.cpu().split([self.rows * self.columns, 2 + 2 * len(self.parts)], dim=1)
        table = rows.reshape(-1, self.columns)
        return table[table[:, 0] == 1].numpy(), sums.sum(dim=0).numpy()

    def _sample_rows(self, losses: Losses, batch: Batch) -> Tensor:
        terms = losses.per_sample
        assert terms is not None
        assert tuple(terms) == self.terms, "the terms of a policy are the same in every batch"
        total = losses.sample_losses
        if total is None:
            total = torch.stack([value / count.clamp(min=1.0) for value, count in terms.values()]).sum(dim=0)
        provenance = [batch[name].to(total.device) for name in PROVENANCE]
        pairs = [column for pair in terms.values() for column in pair]
        return torch.stack([column.double() for column in (torch.ones_like(total), *provenance, total, *pairs)], dim=1)


def gather(vector: Tensor) -> Tensor:
    """Return the vectors of all ranks, (ranks, size). All ranks must call it with vectors of one size."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return vector[None]
    gathered = vector.new_empty(dist.get_world_size() * len(vector))
    dist.all_gather_into_tensor(gathered, vector)
    return gathered.view(dist.get_world_size(), -1)
