"""Streams in the order episode_shuffle: the samples of the order, however they are loaded."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import psutil
import pytest
import torch

from benchbox.data.loading.block_stream import BlockBatches, RankBlocks
from benchbox.data.loading.loader import open_samples, open_stream
from benchbox.data.loading.packing import pack
from benchbox.data.order.episode_shuffle import EpisodeShuffle
from benchbox.data.order.frames import FrameOrder, SampleKey
from benchbox.data.order.groups import generated_group
from benchbox.errors import ConfigurationError, DataError
from benchbox.spec.cell import DataSpec
from tests.support.datasets import copy_with_short_video, write_dataset

LENGTHS = (13, 1, 20, 30)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("episodes") / "bars", lengths=LENGTHS, tasks=("push",) * 4)


def data_of(root, workers=0):
    return DataSpec(kind="lerobot", path=str(root), workers=workers, block=4, buffer=24)


def take(root, spec, count, *, workers=0, batch=2, accumulation=1, rank=0, world_size=1, start_step=0, order="episode_shuffle"):
    stream = open_stream(
        data_of(root, workers),
        spec,
        batch=batch,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        seed=5,
        order=order,
        start_step=start_step,
    )
    try:
        return list(islice(stream, count))
    finally:
        stream.close()


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


def test_the_stream_has_the_samples_of_the_order_bit_for_bit(root, spec):
    samples = open_samples(DataSpec(kind="lerobot", path=str(root)), spec, seed=5)
    order = EpisodeShuffle(samples.groups(), 5, samples_per_step=6, block=4, buffer=24)
    steps = 25  # two epochs, and two rounds
    for rank in range(2):
        batches = take(root, spec, steps, batch=3, rank=rank, world_size=2)
        for step, batch in enumerate(batches):
            keys = [order.key(6 * step + 3 * rank + i) for i in range(3)]
            rows = [samples.sample(key.epoch, key.index) for key in keys]
            assert_same([batch], [{name: torch.stack([row[name] for row in rows]) for name in rows[0]}])


@pytest.mark.parametrize("workers", [1, 3])
def test_worker_processes_give_the_samples_of_the_main_process(root, spec, workers):
    assert_same(take(root, spec, 20), take(root, spec, 20, workers=workers))


@pytest.mark.parametrize("start_step", [1, 3, 11, 12, 13, 30])
def test_a_resumed_stream_continues_bit_for_bit_with_another_number_of_workers(root, spec, start_step):
    """A round has 12 steps, so it resumes at the start, in the middle and at the end of one."""
    straight = take(root, spec, 2 * (start_step + 14), accumulation=2)
    resumed = take(root, spec, 28, accumulation=2, start_step=start_step, workers=2 if start_step in (11, 13) else 0)
    assert_same(straight[2 * start_step :], resumed)


def test_a_step_has_the_same_samples_over_ranks_and_micro_steps(root, spec):
    unsplit = take(root, spec, 7, batch=8)
    parts = [take(root, spec, 14, batch=2, accumulation=2, rank=rank, world_size=2) for rank in range(2)]
    for step, batch in enumerate(unsplit):
        split = [part for rank in parts for part in rank[2 * step : 2 * step + 2]]
        assert_same([batch], [{name: torch.cat([part[name] for part in split]) for name in batch}])


def test_sequential_samples_are_those_of_the_dataset_in_its_order(root, bare_spec):
    batches = take(root, bare_spec, 40, order="sequential")
    seen = [(int(e), int(f)) for batch in batches for e, f in zip(batch["episode_index"], batch["frame_index"], strict=True)]
    frames = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    assert seen == (frames + frames)[:80]


class CountingBlocks:
    """Loader of blocks without content that records how many were loaded."""

    def __init__(self, blocks):
        self._keys = iter(blocks)
        self.loaded = 0

    def __call__(self):
        self.loaded += 1
        return pack([{"epoch": torch.tensor([key.epoch]), "index": torch.tensor([key.index])} for key in next(self._keys)])


@pytest.mark.parametrize(
    ("batch", "block", "buffer", "start_step"), [(8, 16, 512, 0), (4, 4, 64, 0), (8, 16, 512, 100), (6, 1, 60, 3)]
)
def test_blocks_are_loaded_evenly_and_the_buffer_stays_at_one_round(batch, block, buffer, start_step):
    order = EpisodeShuffle([generated_group(5000)], 0, samples_per_step=batch, block=block, buffer=buffer)
    blocks = RankBlocks(order=order, samples_per_rank=batch, rank=0, start_step=start_step)
    load = CountingBlocks(blocks)
    batches = BlockBatches(blocks, load, batch=batch, pinned=False)
    loaded = []
    for step in range(start_step, start_step + 300):
        before = load.loaded
        taken = next(batches).unpack()
        loaded.append(load.loaded - before)
        keys = [SampleKey(int(e), int(i)) for e, i in zip(taken["epoch"], taken["index"], strict=True)]
        assert keys == [order.key(position) for position in range(step * batch, (step + 1) * batch)]
        assert len(batches.buffer) <= order.lanes * block
        assert len(batches._slots) <= 2 * order.lanes, "blocks that were drawn are forgotten"
    after_filling = loaded[order.lanes // batch + block :]
    assert max(after_filling) <= 2 + batch // block
    assert len(batches.buffer) >= order.lanes * block - 2 * block - batch


def test_a_damaged_video_is_one_error_in_workers_too(root, spec, tmp_path):
    broken = copy_with_short_video(write_dataset(tmp_path / "whole"), tmp_path / "broken")
    for workers in (0, 2):
        with pytest.raises(DataError, match=r"no frame at .* s, which the table expects"):
            take(broken, spec, 60, workers=workers)


def test_a_closed_stream_leaves_no_process(root, bare_spec):
    before = set(psutil.Process().children(recursive=True))
    take(root, bare_spec, 3, workers=2)
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


def test_samples_of_different_shapes_are_refused():
    order = EpisodeShuffle([generated_group(8)], 0, samples_per_step=2, block=1, buffer=4)
    blocks = RankBlocks(order=order, samples_per_rank=2, rank=0, start_step=0)
    shapes = iter([(3,), (4,)])
    batches = BlockBatches(blocks, lambda: pack([{"x": torch.zeros(1, *next(shapes))}]), batch=2, pinned=False)
    with pytest.raises(ConfigurationError, match="differ in their fields or shapes"):
        next(batches)


def read_epoch(spec, order, block=16):
    """Return frames decoded per frame used, and frames used per sample, over an epoch of the shipped data.

    Its videos have a key frame every 8 frames.
    """
    source = open_samples(DataSpec(), spec, seed=0)
    if order == "episode_shuffle":
        drawn = EpisodeShuffle(source.groups(), 0, samples_per_step=8, block=block, buffer=256)
        loaded = [drawn.block_keys(number) for number in range(len(source) // block)]
    else:
        frames = FrameOrder(source.groups(), 0)
        loaded = [[frames.key(position)] for position in range(len(source))]
    for keys in loaded:
        source.samples(keys)
    counts = source.members[0].dataset.frame_counts
    return counts.decoded / counts.used, counts.used / sum(map(len, loaded))


@pytest.mark.parametrize(("history", "future", "block"), [(1, 0, 16), (3, 2, 32)])
def test_episode_shuffle_decodes_at_most_a_fifth_more_frames_than_it_uses(bare_spec, history, future, block):
    """The frames before a block, which are history, are decoded from the key frame before them."""
    ratio, used = read_epoch(replace(bare_spec, history=history, future=future), "episode_shuffle", block)
    assert ratio <= 1.2
    assert used <= bare_spec.cameras * (1 + 2 * (history + future - 1) / block), "windows overlap and are not read again"


def test_frames_in_random_order_are_decoded_from_the_key_frame_before_them(bare_spec):
    ratio, _ = read_epoch(replace(bare_spec, history=1), "frame_shuffle")
    assert ratio > 3
