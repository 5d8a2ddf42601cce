"""Batches of a validation: every sample once over all ranks, and the same number of batches on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchbox.data.order.frames import SampleKey

# Epoch of validation samples, in which no training arrives: their noise is that of no training sample, and always the same.
VALIDATION_EPOCH = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ValidationBatch:
    """Samples of one forward pass. `counts` is false for a repeated sample, on a rank that has none left."""

    keys: tuple[SampleKey, ...]
    counts: bool = True


def validation_batches(
    segments: np.ndarray, *, batch: int, rank: int, world_size: int, max_samples: int | None = None
) -> list[ValidationBatch]:
    """Return the batches of one rank, in the stored order of the samples.

    A rank has consecutive samples, so that videos are read forward, and its batches differ by one sample at most. A rank
    without samples for a batch repeats one: a sharded forward pass communicates, so every rank must make it.

    Args:
        segments: (n, 2) int64, the index of the first of consecutive samples, and the index past the last; at least one sample.
        batch: largest number of samples in a batch.
        max_samples: with more samples, so many at equal distances are taken.
    """
    samples = np.concatenate([np.arange(start, stop) for start, stop in segments])
    if max_samples is not None and max_samples < len(samples):
        samples = samples[np.arange(max_samples) * len(samples) // max_samples]
    number = -(-len(samples) // (world_size * batch))  # of batches, for the rank with most samples
    rank_samples = np.array_split(samples, world_size)[rank]
    repeated = ValidationBatch((_key(samples[0]),), counts=False)
    return [ValidationBatch(tuple(map(_key, part))) if len(part) else repeated for part in np.array_split(rank_samples, number)]


def _key(index: int) -> SampleKey:
    return SampleKey(VALIDATION_EPOCH, int(index))
