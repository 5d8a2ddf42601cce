"""Extent of the micro-batches of a step without common padding: that of the rank which needs most memory, and no less."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from benchbox.data.loading.loader import open_stream
from benchbox.data.loading.trimming import Extent
from benchbox.measure.outlines import OutlinedBatches

if TYPE_CHECKING:
    from collections.abc import Collection

    from benchbox.data.loading.loader import SampleSource
    from benchbox.spec.cell import Cell

MAX_SAMPLES_READ = 256  # of a step that are read; their images are decoded, one by one where they are shuffled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExtent:
    """Extent into which every micro-batch of a step fits.

    `is_reached` is whether the last micro-batch of a rank, beside which the gradients of those before it are kept, is as large.
    """

    extent: Extent
    is_reached: bool


def read_extent(cell: Cell, samples: SampleSource, trimmable: Collection[str], step: int = 0) -> StepExtent | None:
    """Return an extent into which every micro-batch of a step fits, on all ranks.

    It has the cameras and the longest texts of all samples of the step, so that none of its micro-batches has more of either.
    None where the step has more than `MAX_SAMPLES_READ`: then only whole batches are certain to be no smaller.

    Raises:
        DataError: the dataset is missing or damaged.
    """
    if cell.samples_per_step > MAX_SAMPLES_READ:
        return None
    micro_batches = cell.world_size * cell.accumulation  # a step has the same samples, in the same order, however it is split
    data = replace(cell.data, workers=0)
    with closing(
        open_stream(
            data,
            None,
            batch=cell.batch,
            accumulation=micro_batches,
            rank=0,
            world_size=1,
            seed=cell.seed,
            order=cell.order,
            start_step=step,
            own_samples=samples,
            on_host=True,
        )
    ) as stream:
        batches = OutlinedBatches(islice(stream, micro_batches))
        for _ in batches:  # which are not kept, only their masks
            pass
    masks = [outline.batch(torch.device("cpu")) for outline in batches.outlines]
    extent = Extent.of(masks, trimmable)
    last = masks[cell.accumulation - 1 :: cell.accumulation]  # of every rank, each of which has a consecutive part of a step
    return StepExtent(extent=extent, is_reached=any(_is_as_large(Extent.of([batch], trimmable), extent) for batch in last))


def _is_as_large(extent: Extent, other: Extent) -> bool:
    cameras, others = (0 if entry.cameras is None else len(entry.cameras) for entry in (extent, other))
    return cameras == others and extent.lengths == other.lengths
