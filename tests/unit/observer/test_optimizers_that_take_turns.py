"""Trainings whose optimizers do not all take part in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from benchbox.audit.judge import judge
from benchbox.observer.observer import StepObserver
from benchbox.optim import MasterWeightOptimizer
from tests.support.observed_trainings import layers

if TYPE_CHECKING:
    from benchbox.observer.facts import RankFacts


def adversarial_facts(generator_class: Any, *, steps: int = 20, every: int = 3, clip: float | None = None) -> RankFacts:
    """Return the facts of a float32 critic that steps each time, and a bfloat16 generator that steps every few times."""
    torch.manual_seed(0)
    critic, generator = layers(), layers(torch.bfloat16)
    of_critic = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    of_generator = generator_class(generator.parameters(), lr=1e-5)
    with StepObserver(source="command", steps=steps) as observer:
        for i in range(steps):
            made = generator(torch.randn(4, 8, dtype=torch.bfloat16)).float()
            critic(made.detach()).square().mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(critic.parameters(), clip * 0.5**i)
            of_critic.step()
            if (i + 1) % every == 0:
                critic(made).square().mean().backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(generator.parameters(), clip)
                of_generator.step()
                of_generator.zero_grad()
            of_critic.zero_grad()
    return observer.facts()


def of_generator(facts: RankFacts) -> list[Any]:
    return [tensor for tensor in facts.stepped if tensor.dtype == "bfloat16"]


def test_an_optimizer_that_steps_between_the_probed_steps_is_probed_when_it_steps() -> None:
    """Steps 1, 10 and 20 are probed, in which the generator takes no part: it is probed in steps 3 and 12."""
    facts = adversarial_facts(torch.optim.AdamW)
    assert [tensor.numbers.steps for tensor in of_generator(facts)] == [2] * 4
    codes = {finding.code for finding in judge([facts]).findings if finding.severity == "error"}
    assert codes >= {"BXP101", "BXP102"}
    assert facts.problems == ()


@pytest.mark.parametrize("every", [3, 5, 10], ids=lambda every: f"every {every}")
def test_each_optimizer_is_probed_once_for_each_probed_step(every: int) -> None:
    facts = adversarial_facts(torch.optim.AdamW, every=every)
    assert {tensor.numbers.steps for tensor in facts.stepped if tensor.dtype == "float32"} == {3}
    assert {tensor.numbers.steps for tensor in of_generator(facts)} == {{3: 2, 5: 3, 10: 2}[every]}


def test_the_norm_of_an_optimizer_is_compared_with_its_clipping_between_the_probed_steps() -> None:
    facts = adversarial_facts(torch.optim.AdamW, clip=1e-4)
    clipped = {step.step: (step.max_norm, step.stepped_norm) for step in facts.steps if step.max_norm is not None}
    assert list(clipped) == [1, 3, 10, 12, 20]
    for step in (3, 12):
        assert clipped[step] == (1e-4, pytest.approx(1e-4, rel=0.02)), "of the generator: the critic was not probed"
    assert "BXP304" in judge([facts]).clean


def with_stale_masters(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer of masters, behind whose back weights are loaded."""
    parameters = list(parameters)
    optimizer = MasterWeightOptimizer(parameters, lr=lr)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1.0)
    return optimizer


def test_masters_that_are_stale_before_their_first_step_are_found_in_any_step() -> None:
    judgement = judge([adversarial_facts(with_stale_masters)])
    assert "BXP504" in {finding.code for finding in judgement.findings}
    assert "BXP104" in judgement.clean


class Unknown(torch.optim.Optimizer):
    """Take what it steps from elsewhere."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Do nothing that a hook sees."""


def test_an_optimizer_of_unknown_arithmetic_without_gradients_is_opaque() -> None:
    model = layers()
    known, unknown = torch.optim.AdamW(model[0].parameters()), Unknown(layers(torch.bfloat16).parameters(), lr=0.1)
    with StepObserver(source="command", steps=3) as observer:
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            known.step()
            unknown.step()
            model.zero_grad()
    assert [(opaque.optimizer, opaque.lossless) for opaque in observer.facts().opaque] == [("Unknown", False)]
