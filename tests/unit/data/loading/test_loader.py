"""A step holds the same samples however it is split, resumed, or loaded."""

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from benchbox.data.loading.loader import open_stream
from benchbox.data.order.frames import FrameOrder, MicroBatchSampler
from benchbox.data.order.groups import generated_group
from benchbox.data.order.randomness import DRAWS, draw_random_fields, generator
from benchbox.measure.memory import TensorStorageTracker
from benchbox.spec.cell import DataSpec

SYNTHETIC = DataSpec(kind="synthetic", workers=0)


def order(samples=23, batch=2, accumulation=1, rank=0, world_size=1, seed=7, start_step=0):
    return MicroBatchSampler(
        order=FrameOrder([generated_group(samples)], seed),
        batch=batch,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        start_step=start_step,
    )


def keys(an_order, micro_batches):
    return [key for batch in islice(iter(an_order), micro_batches) for key in batch]


def take(spec, n, data=SYNTHETIC, batch=2, accumulation=1, rank=0, world_size=1, seed=0, start_step=0, order="frame_shuffle"):
    stream = open_stream(
        data,
        spec,
        batch=batch,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        seed=seed,
        order=order,
        start_step=start_step,
    )
    try:
        return list(islice(stream, n))
    finally:
        stream.close()


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("order", ["frame_shuffle", "episode_shuffle"])
def test_after_a_batch_nothing_but_it_is_in_memory_that_was_loaded(spec, order, workers):
    """A block of many samples that were copied from it would add to the peak memory of a step."""
    data = replace(SYNTHETIC, workers=workers)
    stream = open_stream(data, spec, batch=1, accumulation=1, rank=0, world_size=1, seed=0, order=order)
    with closing(stream), TensorStorageTracker() as memory:
        for _ in range(3):
            batch = next(stream)
            assert memory.current_bytes < 2 * sum(tensor.nbytes for tensor in batch.values())
            del batch
            assert memory.current_bytes < 1000


def test_a_loader_process_that_has_ended_is_named(spec):
    """Torch may say of a batch that it had made that there is no such file."""
    stream = open_stream(replace(SYNTHETIC, workers=1), spec, batch=1, accumulation=1, rank=0, world_size=1, seed=0)
    with closing(stream):
        next(stream)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGINT)
        worker.join()
        with pytest.raises(RuntimeError, match=rf"^loader process {worker.pid} ended with exit code [01]$"):
            list(islice(stream, 9))


def test_every_sample_is_seen_exactly_once_an_epoch_even_when_steps_do_not_divide_it():
    drawn_keys = keys(order(samples=23, batch=4), 23)  # 92 keys: four epochs
    for epoch in range(4):
        assert sorted(key.index for key in drawn_keys if key.epoch == epoch) == list(range(23))


def test_epochs_and_seeds_are_shuffled_differently():
    epoch_0, epoch_1 = keys(order(batch=23), 1), keys(order(batch=23), 2)[23:]
    assert [key.index for key in epoch_0] != [key.index for key in epoch_1]
    assert epoch_0 != keys(order(batch=23, seed=8), 1)
    assert [key.index for key in epoch_0] != list(range(23))


@pytest.mark.parametrize(("batch", "accumulation", "ranks"), [(12, 1, 1), (3, 4, 1), (6, 1, 2), (1, 3, 4), (2, 2, 3)])
def test_a_step_takes_the_same_samples_in_the_same_order_whatever_the_split(batch, accumulation, ranks):
    steps = 5
    per_rank = [
        keys(order(batch=batch, accumulation=accumulation, rank=rank, world_size=ranks), steps * accumulation)
        for rank in range(ranks)
    ]
    per_step = batch * accumulation
    joined = [key for step in range(steps) for rank in per_rank for key in rank[step * per_step : (step + 1) * per_step]]
    assert joined == keys(order(batch=12), steps)


TABLE = {
    "images": ((2, 3, 2, 3, 16, 20), torch.uint8),
    "image_mask": ((2, 3, 2), torch.bool),
    "state": ((2, 3, 8), torch.float32),
    "history_mask": ((2, 3), torch.bool),
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
    "uniform": ((2, 2), torch.float32),
    "dataset_index": ((2,), torch.int64),
    "source_index": ((2,), torch.int64),
    "control_mode_index": ((2,), torch.int64),
    "episode_index": ((2,), torch.int64),
    "frame_index": ((2,), torch.int64),
}
FURTHER = {
    "memory_tokens": ((2, 6), torch.int64),
    "memory_mask": ((2, 6), torch.bool),
    "metadata_tokens": ((2, 3, 7), torch.int64),
    "metadata_mask": ((2, 3, 7), torch.bool),
    "subgoal_images": ((2, 2, 3, 16, 20), torch.uint8),
    "subgoal_mask": ((2, 2), torch.bool),
    "future_images": ((2, 4, 2, 3, 16, 20), torch.uint8),
    "future_mask": ((2, 4), torch.bool),
    "returns": ((2,), torch.float32),
    "field_of_view": ((2, 2), torch.float32),
    "noise": ((2, 2, 5, 6), torch.float32),
    "latent_noise": ((2, 3, 2), torch.float32),
    "memory_cue_tokens": ((2, len("Updated Memory: ")), torch.int64),
    "action_cue_tokens": ((2, len("Action: ")), torch.int64),
}


BARE = {name: of for name, of in TABLE.items() if not name.startswith(("fast_", "response_"))}


@pytest.mark.parametrize("kind", ["synthetic", "lerobot"])
@pytest.mark.parametrize(("asked", "table"), [("bare_spec", BARE), ("spec", TABLE), ("full_spec", TABLE | FURTHER)])
def test_a_batch_is_what_the_spec_asks_for_and_nothing_else(kind, asked, table, dataset_root, request):
    spec = request.getfixturevalue(asked)
    (batch,) = take(spec, 1, data=data_of(kind, dataset_root))
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == table
    assert set(batch) == set(spec.fields())
    assert set(spec.fields(acting=True)) < set(batch)


def data_of(kind, root, workers=0):
    return DataSpec(kind=kind, path=str(root) if kind == "lerobot" else None, workers=workers)


@pytest.mark.parametrize("kind", ["synthetic", "lerobot"])
def test_every_field_of_a_step_is_the_same_over_ranks_micro_steps_and_workers(kind, full_spec, dataset_root):
    (unsplit,) = take(full_spec, 1, data=data_of(kind, dataset_root), batch=8)
    parts = [
        part
        for rank in range(2)
        for part in take(
            full_spec, 2, data=data_of(kind, dataset_root, workers=1), batch=2, accumulation=2, rank=rank, world_size=2
        )
    ]
    assert same(unsplit, {name: torch.cat([part[name] for part in parts]) for name in unsplit})


def test_a_stream_opened_at_a_step_continues_bit_for_bit(spec):
    straight = take(spec, 10, accumulation=2, rank=1, world_size=2)
    resumed = take(spec, 4, accumulation=2, rank=1, world_size=2, start_step=3)
    assert all(same(left, right) for left, right in zip(straight[6:], resumed, strict=True))


def test_splitting_a_batch_over_micro_steps_changes_nothing_random_in_it(spec):
    (unsplit,) = take(spec, 1, batch=4)
    parts = take(spec, 2, batch=2, accumulation=2)
    assert same(unsplit, {name: torch.cat([part[name] for part in parts]) for name in unsplit})


def test_worker_processes_give_the_batches_of_the_main_process(spec):
    alone = take(spec, 5)
    shared = take(spec, 5, data=DataSpec(kind="synthetic", workers=2))
    assert all(same(left, right) for left, right in zip(alone, shared, strict=True))


def test_noise_is_drawn_anew_each_epoch_and_content_is_not(spec):
    from benchbox.data.samples.synthetic import SyntheticSamples

    samples = SyntheticSamples(spec, seed=0)
    epoch_0, epoch_1 = samples.sample(0, 5), samples.sample(1, 5)
    assert torch.equal(epoch_0["images"], epoch_1["images"])
    assert not torch.equal(epoch_0["noise"], epoch_1["noise"])
    assert not torch.equal(epoch_0["uniform"], epoch_1["uniform"])


def test_more_draws_leave_the_first_numbers_of_a_run_as_they_were(spec):
    """Noise, then uniform numbers, then latents, from one generator a sample."""
    rng = generator(DRAWS, 7, 2, 5)
    noise, uniform, latents = rng.standard_normal((1, 5, 6), "f"), rng.random(2, "f"), rng.standard_normal((4, 3), "f")
    drawn = draw_random_fields(replace(spec, latent_shape=(4, 3)), 7, 2, [4, 5])
    assert np.array_equal(drawn["noise"][1], noise)
    assert np.array_equal(drawn["uniform"][1], uniform)
    assert np.array_equal(drawn["latent_noise"][1], latents)
    assert draw_random_fields(spec, 7, 2, [5]).keys() == {"noise", "uniform"}
    assert np.array_equal(draw_random_fields(replace(spec, noise_draws=3), 7, 2, [5])["noise"][0, :1], noise)


def test_a_closed_stream_yields_nothing(spec):
    stream = open_stream(DataSpec(kind="synthetic", workers=1), spec, batch=1, accumulation=1, rank=0, world_size=1, seed=0)
    next(stream)
    stream.close()
    assert next(stream, None) is None


def test_the_thread_that_pins_memory_leaves_this_one_its_threads():
    """On a GPU, all operations of the rank on its CPU ran on one thread."""
    script = """
import threading, torch
from benchbox.data.loading.loader import load_samples
load_samples(lambda keys: keys, [[1]], workers=0, pin_memory=True)
pinning = threading.Thread(target=torch.set_num_threads, args=[1])  # as torch.utils.data._utils.pin_memory does
pinning.start()
pinning.join()
print(torch.get_num_threads())
"""
    variables = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr
