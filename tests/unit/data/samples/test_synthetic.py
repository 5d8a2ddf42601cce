"""Synthetic samples are real throughout, except for what a batch may lack: some samples lack it, by their index."""

from dataclasses import replace

import pytest
import torch

from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.data.text.prompt import ByteTokenizer


def masks(spec, name, indices):
    samples = SyntheticSamples(spec, seed=0)
    return [samples.sample(0, index)[name] for index in indices]


@pytest.mark.parametrize("name", ["response_mask", "memory_mask", "metadata_mask", "subgoal_mask"])
def test_each_block_that_may_be_missing_is_there_and_missing_among_the_first_samples(full_spec, name):
    field_masks = masks(full_spec, name, range(4))
    assert any(mask.all() for mask in field_masks)
    assert any(not mask.any() for mask in field_masks)


def test_single_fields_of_metadata_are_missing_too_each_in_its_turn(full_spec):
    missing = [(~mask).all(1).nonzero().flatten().tolist() for mask in masks(full_spec, "metadata_mask", range(12))]
    assert [fields for fields in missing if len(fields) == 1] == [[0], [1], [2]]


def test_some_text_is_left_to_learn_in_every_sample(full_spec):
    token_counts = [
        sum(int(mask.sum()) for mask in pair)
        for pair in zip(*(masks(full_spec, f"{name}_mask", range(24)) for name in ("response", "memory")), strict=True)
    ]
    assert min(token_counts) > 0


def test_a_past_before_the_episode_is_black_and_masked_and_the_present_is_not(full_spec):
    samples = [SyntheticSamples(replace(full_spec, history=4), seed=0).sample(0, index) for index in range(3)]
    assert {tuple(sample["history_mask"].tolist()) for sample in samples} == {(True,) * 4, (False, False, True, True)}
    for sample in samples:
        assert torch.equal(sample["image_mask"], sample["history_mask"][:, None].expand(4, 2))
        black = sample["images"].flatten(1).amax(1) == 0
        assert torch.equal(black, ~sample["history_mask"])
    for index in range(3):
        assert SyntheticSamples(replace(full_spec, history=1), seed=0).sample(0, index)["history_mask"].all()


def test_the_statistics_are_those_of_states_and_actions(full_spec):
    samples = SyntheticSamples(full_spec, seed=0)
    (statistics,) = samples.statistics
    drawn = [samples.sample(0, index) for index in range(300)]
    for feature, name in (("observation.state", "state"), ("action", "action")):
        values = torch.stack([sample[name] for sample in drawn])
        width = values.shape[-1]
        expected = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
        expected |= {f"q{percent:02d}": values.flatten().quantile(percent / 100) for percent in (1, 10, 50, 90, 99)}
        assert statistics[feature].keys() == expected.keys()
        for statistic, value in expected.items():
            assert statistics[feature][statistic] == [pytest.approx(value.item(), abs=0.05)] * width, statistic


def test_what_follows_and_what_is_said_of_the_whole_is_real(full_spec):
    samples = SyntheticSamples(full_spec, seed=0)
    for index in range(6):
        sample = samples.sample(0, index)
        assert sample["future_mask"].all()
        assert -1 <= sample["returns"] <= 0
        assert (sample["field_of_view"] > 0).all()
        assert ByteTokenizer(300).decode(sample["action_cue_tokens"].tolist()) == "Action: "
    assert len({float(samples.sample(0, index)["returns"]) for index in range(6)}) == 6
