"""Optimizers that step bfloat16 weights without losing updates smaller than half a unit in the last place."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from benchbox.optim.kahan import KahanAdamW
from benchbox.optim.stochastic import StochasticAdamW

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4096


def kahan(params: list[Any], **options: Any) -> KahanAdamW:
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    return KahanAdamW(groups, **({"betas": (0.9, 0.999), "eps": 1e-8} | options))


COMPENSATED = [StochasticAdamW, kahan]


def weights(dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """Return weights like a policy's: normal with a deviation of 0.02, and representable in bfloat16 in every dtype."""
    drawn = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) * 0.02
    return nn.Parameter(drawn.bfloat16().to(dtype))


def gradients(steps: int) -> list[Tensor]:
    """One direction with noise on it, representable in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(SIZE, generator=generator)
    return [(direction + 0.3 * torch.randn(SIZE, generator=generator)).bfloat16() for _ in range(steps)]


def moved(make: Callable[..., Any], dtype: torch.dtype, steps: int, **options: Any) -> Tensor:
    """Return the total change of the weights in float32."""
    weight = weights(dtype)
    before = weight.detach().clone().float()
    optimizer = make([weight], **({"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0} | options))
    for gradient in gradients(steps):
        weight.grad = gradient.to(dtype)
        optimizer.step()
    return weight.detach().float() - before


def share_arrived(change: Tensor, wanted: Tensor) -> float:
    """Return EDQ over a complete run: 1 if the change of the weights has the expected size."""
    return (torch.dot(change, wanted) / torch.dot(wanted, wanted)).item()


@pytest.mark.parametrize("make", COMPENSATED)
def test_updates_too_small_for_bfloat16_arrive(make):
    """At lr 1e-5 weights follow those of float32 AdamW, where AdamW stepping bfloat16 weights loses most of the way."""
    wanted = moved(torch.optim.AdamW, torch.float32, 60)
    assert share_arrived(moved(torch.optim.AdamW, torch.bfloat16, 60), wanted) < 0.4
    assert share_arrived(moved(make, torch.bfloat16, 60), wanted) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("make", COMPENSATED)
def test_the_first_steps_are_those_of_torch(make):
    """At a rate that bfloat16 can follow: the same bias correction and the same epsilon."""
    options = {"lr": 3e-3, "eps": 0.5}
    wanted = moved(torch.optim.AdamW, torch.float32, 3, **options)
    assert torch.allclose(moved(make, torch.bfloat16, 3, **options), wanted, atol=6e-4), "within a last digit or two"
    assert share_arrived(moved(make, torch.bfloat16, 3, **options), wanted) == pytest.approx(1.0, abs=0.02)


def decayed(make: Callable[..., Any]) -> float:
    """Return the factor by which weights shrink in 200 steps with a gradient of zero."""
    weight = weights()
    before = weight.detach().float()
    optimizer = make([weight], lr=1e-4, weight_decay=0.1)
    for _ in range(200):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    return share_arrived(weight.detach().float(), before)


def test_stochastic_rounding_lets_a_small_weight_decay_arrive_and_kahan_summation_does_not():
    """The summary of `bf16_kahan` says so: optimi decays weights outside the sum."""
    assert decayed(StochasticAdamW) == pytest.approx((1 - 1e-5) ** 200, abs=3e-4)
    assert decayed(kahan) == 1.0


@pytest.mark.parametrize("make", COMPENSATED)
def test_a_schedule_reaches_the_step(make):
    """With a rate of zero in the second step only the first one moves the weights; each group has its own rate and decay."""
    fast, slow = weights(), weights()
    groups = [{"params": [fast], "lr": 1e-2}, {"params": [slow], "lr": 1e-3, "weight_decay": 0.0}]
    optimizer = make(groups, lr=1e-3, weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    start = fast.detach().clone()
    positions = []
    for gradient in gradients(2):
        fast.grad, slow.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        schedule.step()
        positions.append((fast.detach().clone(), slow.detach().clone()))
    assert (positions[0][0] - start).float().abs().mean() > 5 * (positions[0][1] - start).float().abs().mean() > 0
    if make is StochasticAdamW:  # Kahan summation may still deliver what the first step left
        assert torch.equal(positions[1][0], positions[0][0])
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.0, 0.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("make", COMPENSATED)
def test_each_group_has_its_own_betas(make):
    """After gradients of 1 and 0 the first moment is (1 - beta1) * beta1; optimi divides it by 1 - beta1^2 at once."""
    own, shared = weights(), weights()
    optimizer = make([{"params": [own], "betas": (0.5, 0.6)}, {"params": [shared]}], lr=1e-3, betas=(0.25, 0.9))
    for value in (1.0, 0.0):
        for weight in (own, shared):
            weight.grad = torch.full_like(weight, value)
        optimizer.step()
    for weight, beta in ((own, 0.5), (shared, 0.25)):
        moment = (1 - beta) * beta / (1 - beta**2 if make is kahan else 1.0)
        assert optimizer.state[weight]["exp_avg"][0].item() == pytest.approx(moment, rel=4e-3)


@pytest.mark.parametrize("drops_gradients", [False, True])
@pytest.mark.parametrize("make", COMPENSATED)
def test_the_first_step_of_a_group_that_was_frozen_is_a_first_step(make, drops_gradients):
    """Adam's first update is the rate in the direction of the gradient, whatever number of steps other groups have taken.

    Under DDP, gradients of frozen parameters are computed and dropped.
    """
    early, late = weights(), weights()
    optimizer = make([{"params": [early]}, {"params": [late]}], lr=2**-7, weight_decay=0.0)
    before = late.detach().clone()
    late.requires_grad_(drops_gradients)
    for _ in range(20):
        early.grad = torch.ones_like(early)
        optimizer.step()
    assert torch.equal(late, before)
    late.requires_grad_(True)
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert (before - late.detach()).float().mean().item() == pytest.approx(2**-7, rel=0.01)


@pytest.mark.parametrize("make", COMPENSATED)
def test_a_resumed_run_continues_bit_for_bit(make):
    """Its state is loaded from a file with `weights_only`, after other draws from the random generator."""

    def take_steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, step_gradients: list[Tensor]) -> None:
        for gradient in step_gradients:
            weight.grad = gradient.clone()
            optimizer.step()

    options = {"lr": 1e-4, "weight_decay": 0.1}
    straight, resumed = weights(), weights()
    optimizer = make([straight], **options)
    take_steps(straight, optimizer, gradients(8)[:5])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    resumed.data.copy_(straight.data)
    take_steps(straight, optimizer, gradients(8)[5:])

    torch.rand(7)
    file.seek(0)
    later = make([resumed], **options)
    later.load_state_dict(torch.load(file, weights_only=True))
    take_steps(resumed, later, gradients(8)[5:])
    assert torch.equal(straight, resumed)


def test_stochastic_rounding_is_the_same_on_every_replica_and_draws_from_nobody():
    """Processes whose generators differ round alike, step after step, and their generators stay where they were."""
    copies = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        copies.append(moved(StochasticAdamW, torch.bfloat16, 4))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*copies)


def test_stochastic_rounding_differs_from_step_to_step():
    """Equal random numbers in every step would always round the same weights up."""
    weight = nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=1e-3)
    rounded = []
    for _ in range(2):
        weight.data.fill_(1.0)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        rounded.append(weight.detach() < 1)
    assert 0.2 < (rounded[0] == rounded[1]).float().mean() < 0.8


def test_a_closure_of_stochastic_rounding_is_evaluated_once_with_gradients_and_its_loss_comes_back() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=0.5, weight_decay=0.0)
    losses = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.float().square().sum()
        loss.backward()
        losses.append(loss.item())
        return loss.item()

    assert [optimizer.step(closure)] == losses == [8.0]
    assert torch.equal(weight.detach(), torch.full((8,), 0.5, dtype=torch.bfloat16))
