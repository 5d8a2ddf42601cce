"""Orders of samples, over lengths, ranks, batches, blocks and weights drawn by hypothesis."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchbox.data.order.episode_shuffle import EpisodeShuffle, GroupBlocks
from benchbox.data.order.frames import FrameOrder, MicroBatchSampler, SampleKey
from benchbox.data.order.groups import SampleGroup, generated_group
from benchbox.data.order.interleaving import Interleaving
from benchbox.data.order.randomness import ORDER, generator
from benchbox.errors import ConfigurationError, DataError

# The same examples in every run, and nothing written beside the tests.
settings.register_profile("orders", derandomize=True, database=None, deadline=None, max_examples=40)
settings.load_profile("orders")

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SPLITS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))  # batch, accumulation, ranks


def make_group(lengths, start=0, gap=0, weight=1.0):
    """Return a group of episodes with `gap` unused frames between them."""
    starts = start + np.cumsum([0, *lengths[:-1]]) + gap * np.arange(len(lengths))
    return SampleGroup(np.stack([starts, starts + lengths], axis=1), weight)


def indices_of(group):
    return [index for start, stop in group.segments.tolist() for index in range(start, stop)]


def read_ranks(order, batch, accumulation, ranks, steps, start_step=0):
    """Return the keys of every rank (ranks, steps * batch * accumulation)."""
    samplers = [
        MicroBatchSampler(
            order=order, batch=batch, accumulation=accumulation, rank=rank, world_size=ranks, start_step=start_step
        )
        for rank in range(ranks)
    ]
    return [[key for keys in islice(sampler, steps * accumulation) for key in keys] for sampler in samplers]


def assert_whole_epochs(keys, group):
    """Check that keys, the beginning of the sequence of a group, repeat none and leave no gap in a completed epoch."""
    epochs = defaultdict(list)
    for key in keys:
        epochs[key.epoch].append(key.index)
    expected = sorted(indices_of(group))
    for epoch, indices in epochs.items():
        assert len(set(indices)) == len(indices), f"epoch {epoch} has an index twice"
        assert set(indices) <= set(expected)
    return [epoch for epoch, indices in epochs.items() if sorted(indices) == expected]


@given(LENGTHS, st.integers(1, 20), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_the_blocks_of_a_group_have_every_sample_once_per_epoch(lengths, size, gap, seed):
    group = make_group(lengths, start=3, gap=gap)
    blocks = GroupBlocks(group, 0, seed, size)
    count = -(-4 * len(group) // size) + len(lengths) + 1
    drawn = [blocks.keys(number) for number in range(count)]
    assert {len(keys) for keys in drawn} == {size}
    complete = assert_whole_epochs([key for keys in drawn for key in keys], group)
    assert {0, 1, 2} <= set(complete)


@given(LENGTHS, st.integers(1, 12), SPLITS, st.integers(1, 200), st.integers(0, 9))
def test_episode_shuffle_draws_every_sample_once_per_epoch_over_all_ranks(lengths, block, split, buffer, seed):
    batch, accumulation, ranks = split
    group = make_group(lengths)
    samples_per_step = batch * accumulation * ranks
    order = EpisodeShuffle([group], seed, samples_per_step=samples_per_step, block=block, buffer=buffer)
    # Complete rounds that have two epochs: the blocks of an epoch may begin in a round of their own.
    rounds = -(-(2 * len(group) + block * len(lengths)) // (order.lanes * block)) + 1
    steps = rounds * order.lanes * block // samples_per_step
    drawn = read_ranks(order, batch, accumulation, ranks, steps)
    complete = assert_whole_epochs([key for keys in drawn for key in keys], group)
    assert {0, 1} <= set(complete)


@given(LENGTHS, SPLITS, st.integers(0, 9), st.booleans())
def test_frame_orders_draw_every_sample_once_per_epoch_over_all_ranks(lengths, split, seed, shuffled):
    group = make_group(lengths, gap=2)
    samples_per_step = split[0] * split[1] * split[2]
    order = FrameOrder([group], seed, shuffled=shuffled)
    steps = -(-3 * len(group) // samples_per_step)
    drawn = read_ranks(order, *split, steps)
    assert {0, 1, 2} <= set(assert_whole_epochs([key for keys in drawn for key in keys], group))


def orders_of(groups, samples_per_step, block=4, buffer=64, seed=3):
    return [
        FrameOrder(groups, seed),
        FrameOrder(groups, seed, shuffled=False),
        EpisodeShuffle(groups, seed, samples_per_step=samples_per_step, block=block, buffer=buffer),
    ]


@given(LENGTHS, LENGTHS, st.sampled_from([(12, 1, 1), (3, 4, 1), (6, 1, 2), (1, 3, 4), (2, 2, 3), (4, 3, 1)]))
def test_a_step_has_the_same_samples_however_it_is_split(lengths, other_lengths, split):
    groups = [make_group(lengths), make_group(other_lengths, start=1000, weight=0.5)]
    for order in orders_of(groups, 12):
        steps = 9
        drawn = read_ranks(order, *split, steps)
        per_rank = split[0] * split[1]
        joined = [key for step in range(steps) for keys in drawn for key in keys[step * per_rank : (step + 1) * per_rank]]
        assert joined == [order.key(position) for position in range(12 * steps)]


@given(LENGTHS, SPLITS, st.integers(0, 40))
def test_a_resumed_order_continues_where_it_was(lengths, split, start_step):
    batch, accumulation, ranks = split
    pairs = [orders_of([make_group(lengths)], batch * accumulation * ranks) for _ in range(2)]
    for resumed, straight in zip(*pairs, strict=True):
        continued = read_ranks(resumed, *split, 5, start_step)
        samples = 5 * batch * accumulation
        assert continued == [keys[-samples:] for keys in read_ranks(straight, *split, start_step + 5)]


@given(LENGTHS, SPLITS, st.integers(1, 9), st.integers(1, 200))
def test_a_block_is_read_forward_by_one_rank_and_a_step_has_as_many_blocks_as_samples(lengths, split, block, buffer):
    batch, accumulation, ranks = split
    samples_per_step = batch * accumulation * ranks
    order = EpisodeShuffle([make_group(lengths)], 0, samples_per_step=samples_per_step, block=block, buffer=buffer)
    for number in range(2):
        start = number * order.lanes * block
        for lane in range(order.lanes):
            positions = range(start + lane, start + order.lanes * block, order.lanes)
            keys = order.block_keys(number * order.lanes + lane)
            assert [order.key(position) for position in positions] == [
                keys[row] for row in order.rows(number * order.lanes + lane)
            ]
            assert len({position % samples_per_step // (batch * accumulation) for position in positions}) == 1


def test_a_complete_block_has_consecutive_frames_from_a_multiple_of_its_size_on():
    group = make_group([37, 16, 5, 64], start=100, gap=7)
    blocks = GroupBlocks(group, 0, 1, 16)
    starts = {start for start, _ in group.segments.tolist()}
    complete = 0
    for number in range(8):  # an epoch: 2 + 1 + 0 + 4 complete blocks and ceil(10 / 16) of the rest
        indices = [key.index for key in blocks.keys(number)]
        if indices == list(range(indices[0], indices[0] + 16)):
            complete += 1
            assert any((indices[0] - start) % 16 == 0 and 0 <= indices[0] - start < 64 for start in starts)
    assert complete == 7


def test_the_blocks_of_episodes_change_places_every_epoch():
    blocks = GroupBlocks(make_group([16] * 12), 0, 5, 16)
    first, second = ([blocks.keys(number)[0].index for number in numbers] for numbers in (range(12), range(12, 24)))
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != sorted(first)


def test_a_step_has_many_phases_of_the_episodes():
    order = EpisodeShuffle([make_group([160] * 40)], 0, samples_per_step=64, block=16, buffer=1024)
    for step in range(32):
        phases = [order.key(64 * step + position).index % 16 for position in range(64)]
        assert len(set(phases)) > 10, "the rows of blocks are drawn in orders of their own"


def test_a_buffer_bounds_the_blocks_that_are_read_at_the_same_time():
    order = EpisodeShuffle([make_group([400] * 9)], 0, samples_per_step=8, block=16, buffer=512)
    assert order.lanes == 32
    assert EpisodeShuffle([make_group([400])], 0, samples_per_step=8, block=16, buffer=1).lanes == 8
    episodes = [key.index // 400 for key in map(order.key, range(8))]
    assert len(set(episodes)) > 3, "a step has samples of many episodes"


@pytest.mark.parametrize("ranks", [1, 7])
def test_one_episode_of_one_frame_feeds_any_number_of_ranks(ranks):
    group = make_group([1])
    for order in orders_of([group], 2 * ranks):
        drawn = read_ranks(order, 2, 1, ranks, 3)
        keys = [key for keys in drawn for key in keys]
        assert {key.index for key in keys} == {0}
        assert len(set(keys)) == len(keys) == 6 * ranks, "every epoch is drawn once"


@given(st.lists(st.sampled_from([0.1, 0.25, 1.0, 1 / 3, 7.0, 0.01]), min_size=1, max_size=6), st.integers(0, 9))
def test_interleaving_gives_every_group_its_share_and_counts_without_gaps(weights, seed):
    interleaving = Interleaving(weights, seed)
    units = [interleaving.locate(unit) for unit in range(6000)]
    numbers = defaultdict(list)
    for group, number in units:
        numbers[group].append(number)
    round_length = max(256, -(-2 * sum(weights) // min(weights)) + 1)
    for group, weight in enumerate(weights):
        # The last round is not complete: its numbers may have gaps.
        assert abs(len(numbers[group]) - 6000 * weight / sum(weights)) <= round_length * weight / sum(weights) + 1
        whole = sorted(numbers[group])[: max(0, len(numbers[group]) - int(round_length))]
        assert whole == list(range(len(whole)))
        assert len(set(numbers[group])) == len(numbers[group])


def test_interleaved_groups_have_epochs_of_their_own():
    small, large = make_group([5, 3], weight=1), make_group([50, 30], start=1000, weight=3)
    for order in orders_of([small, large], 4):
        keys = [order.key(position) for position in range(1024)]
        share = Counter(key.index >= 1000 for key in keys)
        assert abs(share[True] - 768) <= 32
        of_small, of_large = ([key for key in keys if (key.index >= 1000) == is_large] for is_large in (False, True))
        assert set(range(20)) <= set(assert_whole_epochs(of_small, small))
        assert set(range(6)) <= set(assert_whole_epochs(of_large, large))


def test_one_group_has_the_frame_order_that_it_always_had():
    order = FrameOrder([generated_group(23)], seed=7)
    expected = [SampleKey(epoch, int(index)) for epoch in range(3) for index in generator(ORDER, 7, epoch).permutation(23)]
    assert [order.key(position) for position in range(69)] == expected


def test_two_groups_are_not_shuffled_alike():
    groups = [generated_group(40), generated_group(40)]
    keys = [FrameOrder(groups, 0).key(position) for position in range(256)]
    blocks = [GroupBlocks(group, number, 0, 4) for number, group in enumerate(groups)]
    assert [blocks[0].keys(number) for number in range(10)] != [blocks[1].keys(number) for number in range(10)]
    assert len(keys) == 256


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [1.0, 1e-9]])
def test_weights_that_no_order_can_give_are_refused(weights):
    with pytest.raises(ConfigurationError, match="weight"):
        Interleaving(weights, 0)


def test_a_group_without_samples_is_refused():
    with pytest.raises(DataError, match="dataset 1 has no frames"):
        FrameOrder([generated_group(3), generated_group(0)], 0)
    with pytest.raises(DataError, match="no frames"):
        EpisodeShuffle([generated_group(0)], 0, samples_per_step=1, block=1, buffer=1)
