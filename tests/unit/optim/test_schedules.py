"""Schedules follow their formula, continue from a state dict, and hold a frozen backbone at rate 0."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

from benchbox.errors import ConfigurationError
from benchbox.optim import build_schedule, rate_factor
from benchbox.spec.optim import OptimSpec


def optimizer_and_schedule(spec: OptimSpec) -> tuple:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=spec.lr)
    return optimizer, build_schedule(optimizer, spec)


def rates(spec: OptimSpec, steps: int) -> list[float]:
    optimizer, schedule = optimizer_and_schedule(spec)
    return advance(optimizer, schedule, steps)


def advance(optimizer: torch.optim.Optimizer, schedule, steps: int) -> list[float]:
    learning_rates = []
    for _ in range(steps):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return learning_rates


def test_warm_up_then_cosine_with_a_floor() -> None:
    """Rises linearly, is at its peak after the warm-up, falls to the floor and stays there."""
    learning_rates = rates(OptimSpec(lr=1.0, schedule="warmup_cosine", warmup_steps=4, total_steps=14, final_lr=0.1), 20)
    assert learning_rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert learning_rates[9] == pytest.approx(0.55)
    assert learning_rates[14:] == pytest.approx([0.1] * 6)
    assert all(later <= sooner for sooner, later in itertools.pairwise(learning_rates[4:]))


@pytest.mark.parametrize(
    ("shape", "decay"),
    [
        ("linear", [1.0, 0.775, 0.55, 0.325]),
        ("1-sqrt", [1.0, 0.1 + 0.9 * 0.5, 0.1 + 0.9 * (1 - 0.5**0.5), 0.1 + 0.9 * (1 - 0.75**0.5)]),
        (None, [1.0, 0.55, 0.1 + 0.9 * (1 - 0.5**0.5), 0.1 + 0.9 * (1 - 0.75**0.5)]),
    ],
)
def test_wsd_warms_up_stays_and_decays_to_the_floor(shape: str | None, decay: list[float]) -> None:
    spec = OptimSpec(lr=1.0, schedule="wsd", warmup_steps=3, total_steps=12, decay_steps=4, decay_shape=shape, final_lr=0.1)
    assert rates(spec, 14) == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 5, *decay, 0.1, 0.1])


def test_the_decay_of_wsd_takes_a_fifth_of_the_steps_by_default() -> None:
    spec = OptimSpec(lr=1.0, schedule="wsd", warmup_steps=0, total_steps=100, final_lr=0.0)
    learning_rates = rates(spec, 101)
    assert learning_rates[:81] == [1.0] * 81
    assert 0 < learning_rates[81] < 1
    assert learning_rates[100] == 0.0


def test_a_frozen_group_has_rate_0_and_then_warms_up_to_the_rate_of_the_others() -> None:
    spec = OptimSpec(schedule="wsd", warmup_steps=0, total_steps=10, decay_steps=2, thaw_warmup_steps=3, final_lr=0.0)
    usual, frozen = rate_factor(spec, 1.0), rate_factor(spec, 1.0, freeze_steps=4)
    assert [frozen(step) for step in range(4)] == [0.0] * 4
    assert [frozen(step) for step in range(4, 8)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert [frozen(step) for step in range(8, 12)] == [usual(step) for step in range(8, 12)]


def test_a_peak_of_0_has_a_schedule() -> None:
    assert rates(OptimSpec(lr=0.0, schedule="warmup_cosine", warmup_steps=2), 4) == [0.0] * 4


@pytest.mark.parametrize("schedule", ["constant", "warmup_constant", "warmup_cosine", "wsd"])
def test_a_schedule_continues_from_its_state_dict(schedule: str) -> None:
    """Although the new optimizer has other rates: those of a state dict that was loaded before, or of none."""
    spec = OptimSpec(lr=1.0, schedule=schedule, warmup_steps=3, total_steps=12, final_lr=0.1)
    optimizer, state_schedule = optimizer_and_schedule(spec)
    whole = rates(spec, 12)
    advance(optimizer, state_schedule, 5)
    resumed, resumed_schedule = optimizer_and_schedule(spec)
    resumed.param_groups[0]["lr"] = 77.0
    resumed_schedule.load_state_dict(state_schedule.state_dict())
    assert resumed_schedule.step_count == 5
    assert advance(resumed, resumed_schedule, 7) == pytest.approx(whole[5:])


def test_a_rate_in_a_tensor_is_set_in_place_when_a_schedule_continues() -> None:
    """A compiled or captured step reads that tensor."""
    spec = OptimSpec(lr=1.0, schedule="warmup_cosine", warmup_steps=3, total_steps=12, final_lr=0.1)
    optimizer, schedule = optimizer_and_schedule(spec)
    advance(optimizer, schedule, 5)
    resumed, resumed_schedule = optimizer_and_schedule(spec)
    rate = resumed.param_groups[0]["lr"] = torch.tensor(77.0)
    resumed_schedule.load_state_dict(schedule.state_dict())
    assert resumed.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(optimizer.param_groups[0]["lr"])


def test_rates_in_tensors_are_the_same_bit_for_bit_when_a_schedule_continues_from_json() -> None:
    """JSON has the peak of bf16_stochastic as a number."""

    def tensor_rates(start: int, state: str | None) -> tuple[list[float], str]:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(spec.lr), foreach=False)
        schedule = build_schedule(optimizer, spec)
        if state is not None:
            schedule.load_state_dict(json.loads(state))
        values = []
        for step in range(start, 35):
            values.append(optimizer.param_groups[0]["lr"].item())
            optimizer.step()
            schedule.step()
            if step == 10:
                state = json.dumps(schedule.state_dict(), default=float)
        assert state is not None
        return values, state

    spec = OptimSpec(lr=1e-3, schedule="warmup_cosine", warmup_steps=1, total_steps=35)
    whole, state = tensor_rates(0, None)
    assert tensor_rates(11, state)[0] == whole[11:]


def test_an_unknown_schedule_says_which_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean 'constant'"):
        rates(OptimSpec(schedule="constnat"), 1)


def test_the_floor_of_a_decay_is_an_absolute_rate_and_never_above_the_peak() -> None:
    spec = OptimSpec(schedule="warmup_cosine", warmup_steps=0, total_steps=10, final_lr=1e-4)
    assert 1e-3 * rate_factor(spec, 1e-3)(10) == pytest.approx(1e-4)
    assert [rate_factor(spec, 1e-5)(step) for step in (0, 5, 10)] == pytest.approx([1.0] * 3)
