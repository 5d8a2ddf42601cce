"""A step holds the same samples however it is split, resumed, or loaded."""

from itertools import islice

import pytest
import torch

from benchbox.data.loader import open_stream
from benchbox.data.order import Order
from benchbox.spec.cell import DataSpec

SYNTHETIC = DataSpec(kind="synthetic", workers=0)


def order(samples=23, batch=2, accumulation=1, rank=0, world_size=1, seed=7, start_step=0):
    return Order(
        samples=samples,
        batch=batch,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        seed=seed,
        start_step=start_step,
    )


def keys(an_order, micro_batches):
    return [key for batch in islice(iter(an_order), micro_batches) for key in batch]


def take(spec, n, data=SYNTHETIC, batch=2, accumulation=1, rank=0, world_size=1, seed=0, start_step=0):
    stream = open_stream(
        data,
        spec,
        batch=batch,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        seed=seed,
        start_step=start_step,
    )
    try:
        return list(islice(stream, n))
    finally:
        stream.close()


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_every_sample_is_seen_exactly_once_an_epoch_even_when_steps_do_not_divide_it():
    seen = keys(order(samples=23, batch=4), 23)  # 92 keys: four epochs
    for epoch in range(4):
        assert sorted(key.index for key in seen if key.epoch == epoch) == list(range(23))


def test_epochs_and_seeds_are_shuffled_differently():
    first, second = keys(order(batch=23), 1), keys(order(batch=23), 2)[23:]
    assert [key.index for key in first] != [key.index for key in second]
    assert first != keys(order(batch=23, seed=8), 1)
    assert [key.index for key in first] != list(range(23))


@pytest.mark.parametrize(("batch", "accumulation", "ranks"), [(12, 1, 1), (3, 4, 1), (6, 1, 2), (1, 3, 4), (2, 2, 3)])
def test_a_step_takes_the_same_samples_in_the_same_order_whatever_the_split(batch, accumulation, ranks):
    steps = 5
    per_rank = [
        keys(order(batch=batch, accumulation=accumulation, rank=rank, world_size=ranks), steps * accumulation)
        for rank in range(ranks)
    ]
    own = batch * accumulation
    joined = [key for step in range(steps) for rank in per_rank for key in rank[step * own : (step + 1) * own]]
    assert joined == keys(order(batch=12), steps)


def test_the_batch_table_is_delivered_in_full(spec):
    (batch,) = take(spec, 1)
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}
    assert shapes == {
        "images": ((2, 3, 2, 3, 16, 20), torch.uint8),
        "image_mask": ((2, 3, 2), torch.bool),
        "state": ((2, 3, 8), torch.float32),
        "action": ((2, 5, 6), torch.float32),
        "action_is_pad": ((2, 5), torch.bool),
        "action_dim_mask": ((2, 6), torch.bool),
        "prompt_tokens": ((2, 96), torch.int64),
        "prompt_mask": ((2, 96), torch.bool),
        "response_tokens": ((2, 4), torch.int64),
        "response_mask": ((2, 4), torch.bool),
        "fast_tokens": ((2, 12), torch.int64),
        "fast_mask": ((2, 12), torch.bool),
        "fast_truncated": ((2,), torch.int64),
        "noise": ((2, 1, 5, 6), torch.float32),
        "history_mask": ((2, 3), torch.bool),
        "uniform": ((2, 2), torch.float32),
        "dataset_index": ((2,), torch.int64),
        "episode_index": ((2,), torch.int64),
        "frame_index": ((2,), torch.int64),
    }


def test_a_stream_opened_at_a_step_continues_bit_for_bit(spec):
    whole = take(spec, 10, accumulation=2, rank=1, world_size=2)
    resumed = take(spec, 4, accumulation=2, rank=1, world_size=2, start_step=3)
    assert all(same(left, right) for left, right in zip(whole[6:], resumed, strict=True))


def test_splitting_a_batch_over_micro_steps_changes_nothing_random_in_it(spec):
    (whole,) = take(spec, 1, batch=4)
    parts = take(spec, 2, batch=2, accumulation=2)
    assert same(whole, {name: torch.cat([part[name] for part in parts]) for name in whole})


def test_worker_processes_give_the_batches_of_the_main_process(spec):
    alone = take(spec, 5)
    shared = take(spec, 5, data=DataSpec(kind="synthetic", workers=2))
    assert all(same(left, right) for left, right in zip(alone, shared, strict=True))


def test_noise_is_drawn_anew_each_epoch_and_content_is_not(spec):
    from benchbox.data.synthetic import SyntheticSamples

    samples = SyntheticSamples(spec, seed=0)
    first, second = samples.sample(0, 5), samples.sample(1, 5)
    assert torch.equal(first["images"], second["images"])
    assert not torch.equal(first["noise"], second["noise"])
    assert not torch.equal(first["uniform"], second["uniform"])


def test_a_closed_stream_yields_nothing(spec):
    stream = open_stream(DataSpec(kind="synthetic", workers=1), spec, batch=1, accumulation=1, rank=0, world_size=1, seed=0)
    next(stream)
    stream.close()
    assert next(stream, None) is None
