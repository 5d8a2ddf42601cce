"""The chunks of actions of samples, and the FAST tokens that stand for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchbox.data import open_dataset
from benchbox.data.loading.loader import open_samples
from benchbox.data.samples.windows import DatasetSamples
from benchbox.data.text.fast import FastTokenizer
from benchbox.errors import ConfigurationError
from benchbox.spec.cell import DataSpec


@pytest.fixture
def samples(dataset_root, spec):
    return DatasetSamples(open_dataset(dataset_root), spec, seed=0)


def test_actions_past_the_end_of_an_episode_repeat_the_last_and_are_marked(samples):
    sample = samples.sample(0, 11)  # the last but one of an episode of 13
    assert sample["action_is_pad"].tolist() == [False, False, True, True, True]
    torch.testing.assert_close(sample["action"][:, 0], torch.tensor([1.1, 1.2, 1.2, 1.2, 1.2]))


@pytest.mark.parametrize(
    ("index", "actions", "outside"),
    [
        (0, [0.0, 0.0, 0.0, 0.1, 0.2], [True, True, False, False, False]),
        (15, [1.4, 1.4, 1.5, 1.6, 1.7], [True, False, False, False, False]),  # the second frame of its episode
        (12, [1.0, 1.1, 1.2, 1.2, 1.2], [False, False, False, True, True]),  # the last one of its episode
    ],
)
def test_a_chunk_may_begin_before_the_current_frame_and_repeats_the_first_action_of_an_episode(
    dataset_root, spec, index, actions, outside
):
    """Repeated actions are marked before the start of an episode as they are past its end, as in lerobot."""
    sample = DatasetSamples(open_dataset(dataset_root), replace(spec, first_action=-2), seed=0).sample(0, index)
    torch.testing.assert_close(sample["action"][:, 0], torch.tensor(actions))
    assert sample["action_is_pad"].tolist() == outside


@pytest.mark.parametrize("first", [1, -5])
def test_a_chunk_without_the_action_of_the_current_frame_is_refused(spec, first):
    with pytest.raises(ConfigurationError, match=rf"BatchSpec.first_action: is {first}, .* write a number from -4 to 0"):
        replace(spec, first_action=first)


def test_frames_of_an_episode_read_at_once_have_the_chunks_of_single_ones(dataset_root, spec):
    samples = DatasetSamples(open_dataset(dataset_root), replace(spec, first_action=-2), seed=0)
    rows = samples.samples(0, 14, 34)
    for key in ("action", "action_is_pad"):
        assert torch.equal(rows[key], torch.stack([samples.sample(0, index)[key] for index in range(14, 34)]))


def test_fast_tokens_stand_for_the_normalised_chunk(dataset_root, spec):
    samples = open_samples(DataSpec(kind="lerobot", path=str(dataset_root)), replace(spec, fast_tokens=40), 0)
    sample = samples.sample(0, 22)
    ids = sample["fast_tokens"][sample["fast_mask"]].tolist()
    assert sample["fast_tokens"][~sample["fast_mask"]].unique().tolist() == [255]
    assert int(sample["fast_truncated"]) == 0
    # frames 0 to 33 hold actions (i, -i) / 10: min_max puts frame i at -1 + 2 i / 33 in the first dimension
    expected = -1 + 2 * np.arange(22, 27) / 33
    chunk = samples.fast.decode(ids)
    np.testing.assert_allclose(chunk, np.stack([expected, -expected], 1), atol=5**0.5 / 20 + 1e-3)


def test_fast_tokens_that_do_not_fit_are_counted(dataset_root, spec):
    data = DataSpec(kind="lerobot", path=str(dataset_root))
    complete, cut = (open_samples(data, replace(spec, fast_tokens=tokens), 0).sample(0, 2) for tokens in (40, 1))
    wanted = int(complete["fast_mask"].sum())
    assert wanted > 1
    assert int(cut["fast_truncated"]) == wanted - 1
    assert cut["fast_tokens"].tolist() == complete["fast_tokens"][:1].tolist()


def test_chunks_are_trained_on_in_a_fixed_order(dataset_root, spec):
    data = DataSpec(kind="lerobot", path=str(dataset_root))
    tokenizer, another = (open_samples(data, spec, seed).fast for seed in (0, 1))
    assert isinstance(tokenizer, FastTokenizer)
    chunk = np.linspace(-1, 1, 10).reshape(5, 2)
    assert tokenizer.encode(chunk) == another.encode(chunk)
