"""Statistics reach the network in float32, whatever the policy is cast to."""

import pytest
import torch

from benchbox.data.normalisation import Normaliser
from benchbox.errors import DataError, MismatchError

STATS = {
    "mean": [1.0, -2.0, 5.0],
    "std": [0.5, 4.0, 0.0],
    "min": [0.0, -10.0, 5.0],
    "max": [2.0, 6.0, 5.0],
    "q01": [0.1, -9.0, 5.0],
    "q99": [1.9, 5.0, 5.0],
}
FIRST = torch.zeros(1, dtype=torch.int64)


def loaded(mode, dim=5):
    normaliser = Normaliser(dim, mode)
    normaliser.load([STATS])
    return normaliser


@pytest.mark.parametrize(
    ("mode", "low", "high"), [("min_max", "min", "max"), ("quantile", "q01", "q99")], ids=["min_max", "quantile"]
)
def test_the_named_range_lands_on_minus_one_to_one(mode, low, high):
    ends = torch.zeros(1, 2, 5)
    ends[0, 0, :2], ends[0, 1, :2] = torch.tensor(STATS[low][:2]), torch.tensor(STATS[high][:2])
    out = loaded(mode).normalise(ends, FIRST)
    torch.testing.assert_close(out[0, :, :2], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), atol=2e-6, rtol=0)


def test_mean_std_gives_zero_mean_and_unit_deviation():
    out = loaded("mean_std").normalise(torch.tensor([[1.5, 2.0, 5.0, 0.0, 0.0]]), FIRST)
    torch.testing.assert_close(out[0, :2], torch.ones(2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["identity", "mean_std", "min_max", "quantile"])
def test_denormalise_undoes_normalise(mode):
    normaliser = loaded(mode)
    x = torch.randn(4, 6, 5)
    index = torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(normaliser.denormalise(normaliser.normalise(x, index), index), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantile"])
def test_dimensions_without_range_and_padding_are_left_alone(mode):
    x = torch.tensor([[1.0, 1.0, 7.0, 0.0, 3.0]])
    assert loaded(mode).normalise(x, FIRST)[0, 2:].tolist() == [7.0, 0.0, 3.0]


def test_each_sample_uses_the_statistics_of_its_dataset():
    normaliser = Normaliser(2, "mean_std")
    normaliser.load([{"mean": [0.0], "std": [1.0]}, {"mean": [10.0], "std": [2.0]}])
    out = normaliser.normalise(torch.tensor([[12.0, 0.0], [12.0, 0.0]]), torch.tensor([1, 0]))
    torch.testing.assert_close(out, torch.tensor([[1.0, 0.0], [12.0, 0.0]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_casting_the_policy_leaves_the_statistics_in_float32(cast):
    policy = torch.nn.Sequential(torch.nn.Linear(5, 5), loaded("mean_std"))
    before = policy[1].offset.clone()
    cast(policy)
    assert policy[0].weight.dtype is not torch.float32
    assert policy[1].offset.dtype is policy[1].scale.dtype is torch.float32
    assert torch.equal(policy[1].offset, before)


def test_it_moves_between_devices_and_is_built_on_meta():
    with torch.device("meta"):
        normaliser = Normaliser(3, "quantile")
    assert normaliser.normalise(torch.empty(2, 4, 3, device="meta"), torch.zeros(2, dtype=torch.int64)).shape == (2, 4, 3)
    normaliser.to_empty(device="cpu").load([STATS])
    assert normaliser.scale[0, 0].item() == pytest.approx(0.9, abs=1e-5)
    assert loaded("quantile").to("meta", torch.bfloat16).offset.dtype is torch.float32


def test_a_buffer_cast_behind_its_back_is_refused_and_not_used():
    normaliser = loaded("mean_std")
    normaliser.offset.data = normaliser.offset.bfloat16()  # what FSDP1 does with buffer_dtype
    with pytest.raises(MismatchError, match="float32"):
        normaliser.normalise(torch.zeros(1, 5), FIRST)


@pytest.mark.parametrize(
    ("mode", "stats", "says"),
    [
        ("quantile", {"mean": [0.0], "std": [1.0]}, "'q01'.*normalise by identity or mean_std"),
        ("mean_std", {"mean": [0.0] * 9, "std": [1.0] * 9}, "takes 5 dimensions"),
        ("mean_std", {"mean": [0.0], "std": [1.0, 1.0]}, "1 and 2 dimensions"),
        ("min_max", {"min": [0.0], "max": [float("inf")]}, "dataset 0: statistic 'max' is inf in dimension 0"),
        ("mean_std", {"mean": ["a"], "std": [1.0]}, "dataset 0: statistic 'mean' holds \\['a'\\], and a list of numbers"),
    ],
    ids=["missing", "too wide", "unequal", "infinite", "text"],
)
def test_statistics_that_cannot_be_used_are_named(mode, stats, says):
    with pytest.raises(DataError, match=says):
        Normaliser(5, mode).load([stats])


def test_identity_needs_no_statistics():
    normaliser = Normaliser(2, "identity")
    normaliser.load([{}])
    assert normaliser.normalise(torch.ones(1, 2), FIRST).tolist() == [[1.0, 1.0]]


def test_it_takes_as_many_datasets_as_are_loaded():
    normaliser = Normaliser(2, "mean_std")
    for number in (3, 1, 2):
        normaliser.load([{"mean": [float(dataset)], "std": [1.0]} for dataset in range(number)])
        assert normaliser.offset[:, 0].tolist() == list(range(number))
        assert len(normaliser.state_dict()["scale"]) == number


def test_weights_with_the_statistics_of_another_number_of_datasets_are_one_line():
    three, two = (Normaliser(2, "identity") for _ in range(2))
    three.load([{}, {}, {}])
    two.load([{}, {}])
    with pytest.raises(DataError, match=r"^the weights come with the statistics of 3 .* has those of 2: "):
        torch.nn.Sequential(two).load_state_dict(torch.nn.Sequential(three).state_dict())
