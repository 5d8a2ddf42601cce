"""Random numbers are functions of a purpose, the seed and the place: a change of any key would change every training."""

from __future__ import annotations

import numpy as np

from benchbox.data.order.episode_shuffle import EpisodeShuffle, GroupBlocks
from benchbox.data.order.frames import FrameOrder
from benchbox.data.order.groups import SampleGroup
from benchbox.data.order.interleaving import Interleaving
from benchbox.data.order.randomness import draw_random_fields
from benchbox.data.samples.selection import validation_episodes
from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.registry.contracts import BatchSpec

SEED = 3
SPEC = BatchSpec(cameras=1, image_size=(8, 8), state_dim=2, action_dim=3, horizon=4, prompt_tokens=1, text_vocab=9, uniforms=2)


def stream(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))


def group(*segments: tuple[int, int]) -> SampleGroup:
    return SampleGroup(np.array(segments))


def test_frames_are_permuted_by_seed_epoch_and_dataset() -> None:
    order = FrameOrder([group((0, 10)), group((100, 106))], SEED)
    keys = [order.key(position) for position in range(256)]
    for number, (start, size) in enumerate([(0, 10), (100, 6)]):
        for epoch in (0, 1, 5):
            drawn = [key.index for key in keys if key.epoch == epoch and (key.index >= 100) == (number == 1)]
            assert drawn == (start + stream(0, SEED, epoch, number).permutation(size)).tolist()


def test_datasets_are_interleaved_by_seed_and_round() -> None:
    interleaving = Interleaving([3.0, 1.0], SEED)
    for number in (0, 1):
        expected = stream(4, SEED, number).permutation(np.repeat([0, 1], [192, 64]))
        assert [interleaving.locate(unit)[0] for unit in range(256 * number, 256 * (number + 1))] == expected.tolist()


def test_noise_and_uniform_numbers_are_drawn_by_seed_epoch_and_sample() -> None:
    fields = draw_random_fields(SPEC, SEED, 5, [7, 8])
    for row, index in enumerate((7, 8)):
        numbers = stream(1, SEED, 5, index)
        assert np.array_equal(fields["noise"][row], numbers.standard_normal((1, 4, 3), dtype=np.float32))
        assert np.array_equal(fields["uniform"][row], numbers.random(2, dtype=np.float32))


def test_generated_samples_depend_on_seed_and_index() -> None:
    images = SyntheticSamples(SPEC, SEED).sample(5, 7)["images"]
    assert np.array_equal(images, stream(2, SEED, 7).integers(0, 256, (1, 1, 3, 8, 8), dtype=np.uint8))


def test_episodes_are_left_for_validation_by_seed_and_dataset() -> None:
    chosen = validation_episodes(np.arange(10), 10, 0.3, SEED, dataset=2)
    assert chosen.tolist() == sorted(stream(3, SEED, 2).permutation(10)[:3].tolist())


def test_blocks_their_rows_and_the_ends_of_episodes_are_permuted_by_seed_and_place() -> None:
    episodes = group((0, 5), (10, 16), (20, 27))  # a block of four each, and one, two and three frames after them
    shuffle = EpisodeShuffle([episodes], SEED, samples_per_step=1, block=4, buffer=4)
    assert [shuffle.rows(number) for number in (0, 9)] == [stream(7, SEED, number).permutation(4).tolist() for number in (0, 9)]

    blocks = GroupBlocks(episodes, 2, SEED, 4)
    order = stream(5, SEED, 0, 2).permutation(5)  # three blocks, and two of the frames after them
    ends = [[4], [14, 15], [24, 25, 26]]
    rest = [frame for epoch in (0, 1) for end in stream(6, SEED, epoch, 2).permutation(3) for frame in ends[end]]
    expected = [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23], rest[:4], rest[4:8]]
    assert [[key.index for key in blocks.keys(number)] for number in range(5)] == [expected[block] for block in order]
