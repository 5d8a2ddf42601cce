"""Tests on correct training loops with an unusual structure: the audit has no findings."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchbox.audit.judge import judge
from benchbox.observer.facts import RankFacts
from benchbox.observer.observer import StepObserver
from tests.support.tiny_training import Masters, Policy, batches, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.audit.judge import Judgement

    Script = Callable[[], None]


def observe(script: Script) -> tuple[RankFacts, Judgement]:
    with StepObserver(source="command", steps=6) as observer:
        script()
    facts = RankFacts.from_dict(observer.facts().to_dict())
    assert facts.problems == (), "the observer failed"
    return facts, judge([facts])


def step_masters(policy: Policy, masters: Masters) -> None:
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch).backward()
        masters.step()
        masters.zero_grad()


def masters_in_groups() -> None:
    """Masters whose order is not that of the parameters: those that decay are sorted to the front."""
    policy = Policy().to(torch.bfloat16)
    live = sorted(policy.parameters(), key=lambda parameter: parameter.ndim < 2)
    step_masters(policy, Masters(live, lr=1e-3))


def masters_of_a_part() -> None:
    policy = Policy().to(torch.bfloat16)
    step_masters(policy, Masters(policy.head.parameters(), lr=1e-3))


def one_flat_master() -> None:
    policy = Policy().to(torch.bfloat16)
    live = list(policy.parameters())
    flat = torch.cat([parameter.detach().float().flatten() for parameter in live]).requires_grad_()
    optimizer = torch.optim.AdamW([flat], lr=1e-3)
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch).backward()
        flat.grad = torch.cat([parameter.grad.float().flatten() for parameter in live])
        optimizer.step()
        policy.zero_grad()
        with torch.no_grad():
            for parameter, part in zip(live, flat.split([parameter.numel() for parameter in live]), strict=True):
                parameter.copy_(part.view_as(parameter))


def a_temperature_beside() -> None:
    """Only the head is trained, and the other parameters are not frozen."""
    policy = Policy()
    temperature = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.AdamW([*policy.head.parameters(), temperature], lr=1e-3)
    for batch in batches(8):
        (loss_of(policy, batch) * temperature.exp() - temperature).backward()
        optimizer.step()
        policy.zero_grad()
        temperature.grad = None


def a_target_that_follows() -> None:
    critic = Policy()
    target = copy.deepcopy(critic)
    temperature = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([*critic.parameters(), temperature], lr=1e-3)
    for batch in batches(8):
        aim = target(batch).detach() - 1
        ((critic(batch) - aim).square().mean() * temperature.exp() - temperature).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, 0.005)


def adversaries(*, generator_every: int = 1, critic_from: int = 0, critic_scheduled: bool = True) -> Script:
    """Two optimizers of one class, whose schedules differ."""

    def script() -> None:
        generator = Policy()
        critic = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
        forging = torch.optim.Adam(generator.parameters(), lr=1e-3)
        judging = torch.optim.Adam(critic.parameters(), lr=1e-4)
        forging_schedule = CosineAnnealingLR(forging, 50)
        judging_schedule = CosineAnnealingLR(judging, 50) if critic_scheduled else None
        for step, batch in enumerate(batches(12 * generator_every)):
            if step >= critic_from:
                judging.zero_grad()
                (critic(generator(batch).detach()).mean() - critic(batch).mean()).backward()
                judging.step()
            if judging_schedule is not None:
                judging_schedule.step()
            if step % generator_every == generator_every - 1:
                forging.zero_grad()
                (-critic(generator(batch)).mean()).backward()
                forging.step()
                forging_schedule.step()

    return script


def a_second_stage() -> None:
    """Each stage has a separate optimizer and schedule; those of the first stage are still alive."""
    policy = Policy()
    for lr, steps in ((1e-3, 3), (1e-4, 6)):
        optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
        schedule = CosineAnnealingLR(optimizer, 20)
        for batch in batches(steps):
            loss_of(policy, batch).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def float64() -> None:
    policy = Policy().double()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for batch in batches(8, torch.float64):
        (policy(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def stepped_while_gradients_arrive() -> None:
    """One optimizer for each parameter, stepped as soon as its gradient is ready."""
    policy = Policy()
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in policy.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for batch in batches(8):
        loss_of(policy, batch).backward()


SCRIPTS = {
    "masters in groups": masters_in_groups,
    "masters of a part": masters_of_a_part,
    "one flat master": one_flat_master,
    "a temperature that is learned beside": a_temperature_beside,
    "a target that follows": a_target_that_follows,
    "a generator and a critic": adversaries(),
    "a critic that steps more often": adversaries(generator_every=5),
    "a critic without a schedule": adversaries(generator_every=2, critic_scheduled=False),
    "a critic that begins later": adversaries(critic_from=4),
    "a second stage": a_second_stage,
    "float64": float64,
    "stepped while gradients arrive": stepped_while_gradients_arrive,
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of a critic that begins later
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_correct_loop_has_no_findings(script: Script) -> None:
    facts, judgement = observe(script)
    assert facts.steps
    assert [(finding.code, finding.evidence) for finding in judgement.findings if finding.severity != "info"] == []


@pytest.mark.parametrize("script", [masters_in_groups, masters_of_a_part])
def test_masters_are_linked_by_value_where_their_order_is_ambiguous(script: Script) -> None:
    facts, judgement = observe(script)
    live = {parameter.name: parameter for parameter in facts.parameters if parameter.linked}
    assert {tensor.name for tensor in facts.stepped} == live.keys()
    assert {tensor.name: tensor.live_dtype for tensor in facts.stepped} == dict.fromkeys(live, "bfloat16")
    assert {"BXP104", "BXP404"} <= {*judgement.clean}


def test_parameters_that_change_without_an_observed_step_are_not_judged() -> None:
    _, judgement = observe(one_flat_master)
    assert "could not be determined" in judgement.not_judged["BXP404"]
