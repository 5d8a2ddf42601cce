"""Batches of a validation: every sample once over all ranks, and equally many forward passes on each."""

from itertools import product

import numpy as np
import pytest

from benchbox.data.order.validation import VALIDATION_EPOCH, validation_batches

SEGMENTS = np.array([[3, 7], [10, 11], [20, 26]])  # 11 samples


def batches_of_ranks(segments, ranks, **options):
    return [validation_batches(segments, rank=rank, world_size=ranks, **options) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "batch"), list(product((1, 2, 3, 4, 13), (1, 2, 3, 100))))
def test_every_sample_counts_once_in_equally_many_batches_of_every_rank(ranks, batch):
    for length in range(1, 12):
        segments = np.array([[5, 5 + length]])
        plan = batches_of_ranks(segments, ranks, batch=batch)
        counted = [key.index for own in plan for planned in own if planned.counts for key in planned.keys]
        assert counted == list(range(5, 5 + length)), "in the stored order, rank by rank"
        assert len({len(own) for own in plan}) == 1
        assert len(plan[0]) == -(-length // (ranks * batch)), "no more than needed"
        assert all(1 <= len(planned.keys) <= batch for own in plan for planned in own)
        repeated = [key.index for own in plan for planned in own if not planned.counts for key in planned.keys]
        assert set(repeated) <= set(counted), "a sample that exists"


def test_samples_have_an_epoch_of_their_own():
    (batch,) = validation_batches(SEGMENTS, batch=100, rank=0, world_size=1)
    assert {key.epoch for key in batch.keys} == {VALIDATION_EPOCH}
    assert [key.index for key in batch.keys] == [3, 4, 5, 6, 10, 20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize(("number", "expected"), [(1, [3]), (3, [3, 6, 22]), (4, [3, 5, 20, 23]), (11, None), (50, None)])
def test_at_most_so_many_samples_are_taken_at_equal_distances(number, expected):
    taken = [
        key.index
        for own in batches_of_ranks(SEGMENTS, 2, batch=2, max_samples=number)
        for planned in own
        if planned.counts
        for key in planned.keys
    ]
    assert taken == (expected or [3, 4, 5, 6, 10, 20, 21, 22, 23, 24, 25])
