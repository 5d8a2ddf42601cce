"""Averages of weights are float32, follow their formula, and continue from their state."""

from __future__ import annotations

import pytest
import torch

from benchbox.optim import WeightAverages


def test_averages_of_bfloat16_weights_keep_what_bfloat16_cannot() -> None:
    weights = {"weight": torch.ones(4, dtype=torch.bfloat16)}
    averages = WeightAverages(weights, 0.999, warmup=False)
    weights["weight"] += 0.5
    averages.update(weights)
    assert averages.tensors["weight"].dtype == torch.float32
    torch.testing.assert_close(averages.tensors["weight"], torch.full((4,), 1.0005))


def test_averages_begin_as_a_copy_of_the_weights() -> None:
    weights = {"weight": torch.ones(4)}
    averages = WeightAverages(weights, 0.5, warmup=False)
    weights["weight"].zero_()
    assert averages.tensors["weight"].tolist() == [1.0] * 4


def test_a_warm_up_lets_early_weights_go_sooner() -> None:
    """The decay is (1 + n) / (10 + n) until it reaches the configured one."""
    weights = {"weight": torch.zeros(1)}
    averages = WeightAverages(weights, 0.4, warmup=True)
    decays = []
    for _ in range(8):
        decays.append(averages.next_decay)
        averages.update(weights)
    assert decays == pytest.approx([2 / 11, 3 / 12, 4 / 13, 5 / 14, 0.4, 0.4, 0.4, 0.4])


def test_averages_continue_from_their_state_and_refuse_another_sharding() -> None:
    weights = {"weight": torch.arange(4.0)}
    averages, resumed = (WeightAverages(weights, 0.9, warmup=True) for _ in range(2))
    weights["weight"] += 1.0
    averages.update(weights)
    resumed.load_state_dict(averages.state_dict())
    for both in (averages, resumed):
        both.update(weights)
    assert torch.equal(averages.tensors["weight"], resumed.tensors["weight"])
    with pytest.raises(ValueError, match="sharded differently"):
        WeightAverages({"weight": torch.zeros(2)}, 0.9, warmup=True).load_state_dict(averages.state_dict())


def test_averages_of_float32_weights_move_by_what_the_decay_leaves() -> None:
    weights = {"weight": torch.ones(4)}
    averages = WeightAverages(weights, 0.9, warmup=False)
    weights["weight"] += 1.0
    averages.update(weights)
    torch.testing.assert_close(averages.tensors["weight"], torch.full((4,), 1.1))
