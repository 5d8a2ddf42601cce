"""Tests on real trainings that are healthy but unusual: no rule fires, and none passes what it could not observe."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from benchbox.audit.judge import Judgement, judge
from benchbox.observer.facts import RankFacts
from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Policy(nn.Module):
    """An embedding of which a batch touches few rows, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(512, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.tokens(tokens)))


def train(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    first_step: int = 0,
    schedule: Any = None,
    clip: Callable[[], Any] = lambda: None,
) -> None:
    for step in range(first_step, first_step + steps):
        tokens = torch.arange(8 * step, 8 * step + 8)
        policy(tokens).float().square().mean().backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def observe(policy: Policy, optimizer: torch.optim.Optimizer, **options: Any) -> RankFacts:
    with StepObserver(source="command", steps=6) as observer:
        train(policy, optimizer, 8, **options)
    facts = RankFacts.from_dict(observer.facts().to_dict())
    assert facts.problems == ()
    return facts


def codes(judgement: Judgement) -> list[str]:
    return [finding.code for finding in judgement.findings]


@pytest.mark.parametrize(
    "compose",
    [
        lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, total_iters=3), schedules.CosineAnnealingLR(o, 9)], [3]),
        lambda o: schedules.ChainedScheduler([schedules.LinearLR(o, total_iters=3), schedules.ExponentialLR(o, 0.9)]),
    ],
    ids=["one after the other", "together"],
)
def test_schedules_made_of_others_reach_the_optimizer(compose: Callable[[Any], Any]) -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    judgement = judge([observe(policy, optimizer, schedule=compose(optimizer))])
    assert codes(judgement) == []
    assert "BXP401" in judgement.clean


def test_a_warm_up_that_begins_below_the_precision_of_float32_pins_nothing() -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-9)
    assert codes(judge([observe(policy, optimizer)])) == []


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.RMSprop])
def test_updates_that_cannot_be_computed_are_not_judged(make: Callable[..., torch.optim.Optimizer]) -> None:
    policy = Policy().to(torch.bfloat16)
    judgement = judge([observe(policy, make(policy.parameters(), lr=1e-3))])
    assert "BXP101" in codes(judgement)
    assert "no update was computed" in judgement.not_judged["BXP102"]


class Mystery(torch.optim.Optimizer):
    """Rounds stochastically, which no state shows."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            weight = parameter.float() - self.param_groups[0]["lr"] * parameter.grad.float()
            random_bits = torch.randint(2**16, weight.shape, dtype=torch.int32)
            parameter.copy_(((weight.view(torch.int32) + random_bits) & -(2**16)).view(torch.float32))


@pytest.mark.parametrize(("make", "severity"), [(Mystery, "unknown"), (torch.optim.SGD, "error")])
def test_an_optimizer_of_unknown_arithmetic_may_keep_what_rounding_loses(
    make: Callable[..., torch.optim.Optimizer], severity: str
) -> None:
    policy = Policy().to(torch.bfloat16)
    judgement = judge([observe(policy, make(policy.parameters(), lr=1e-3))])
    severities = {finding.code: finding.severity for finding in judgement.findings}
    assert severities["BXP101"] == severity
    assert severities.get("BXP604") == ("unknown" if severity == "unknown" else None)


def clipped(parameters: Callable[[Policy], Iterable[nn.Parameter]]) -> Judgement:
    policy = Policy()
    for parameter in policy.head.parameters():
        parameter.register_hook(lambda gradient: 100 * gradient)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    facts = observe(policy, optimizer, clip=lambda: nn.utils.clip_grad_norm_(parameters(policy), 0.01))
    assert facts.steps[0].stepped_norm == pytest.approx(0.01, rel=1e-3)
    return judge([facts])


def test_a_script_may_clip_only_some_of_its_parameters() -> None:
    judgement = clipped(lambda policy: policy.tokens.parameters())
    assert codes(judgement) == []
    assert "BXP304" in judgement.clean


def test_clipping_is_observed_for_any_form_of_the_parameters() -> None:
    for judgement in (clipped(lambda policy: [*policy.parameters()]), clipped(lambda policy: iter(policy.parameters()))):
        assert codes(judgement) == []
        assert "BXP304" in judgement.clean


def resumed(policy: Policy) -> Judgement:
    """Eight steps, then eight more under an observer, on weights that began as bfloat16 values."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    train(policy, optimizer, 8)
    return judge([observe(policy, optimizer, first_step=8)])


def rounded(policy: Policy) -> Policy:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return policy


def round_moments(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> None:
    for state in optimizer.state.values():
        for name in names:
            state[name].copy_(state[name].to(torch.bfloat16))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
def test_float32_weights_that_are_rounded_after_every_step_are_found(make: Any) -> None:
    """A program evaluates in bfloat16 after each step, and casts the weights back."""
    policy = Policy()
    optimizer = make(policy.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: rounded(policy))
    finding = judge([observe(policy, optimizer)]).findings[0]  # small steps may be lost as a whole, which is another one
    assert (finding.code, finding.severity) == ("BXP101", "error")
    assert finding.title == "weights are float32 by type, and rounded to bfloat16 after every step"
    assert finding.evidence["share of moved elements that bfloat16 holds exactly"] == 1.0
    assert "float32" in finding.repair


@pytest.mark.parametrize("lr", [0.0, 1e-3], ids=["no step of the warm-up moves", "every step moves"])
def test_float32_weights_that_began_as_bfloat16_values_are_not_rounded_after_every_step(lr: float) -> None:
    policy = rounded(Policy())
    judgement = judge([observe(policy, torch.optim.AdamW(policy.parameters(), lr=lr))])
    assert "BXP101" in judgement.clean


@pytest.mark.parametrize(
    ("names", "found"),
    [(("exp_avg", "exp_avg_sq"), ["BXP201", "BXP502"]), (("exp_avg",), ["BXP502"])],
    ids=["both", "the first"],
)
def test_float32_moments_that_are_rounded_after_every_step_are_found_without_a_resume(
    names: tuple[str, ...], found: list[str]
) -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: round_moments(optimizer, names))
    judgement = judge([observe(policy, optimizer)])
    assert codes(judgement) == found
    finding = judgement.findings[-1]
    assert (finding.severity, finding.evidence["state"]) == ("warning", [*names])
    assert finding.title == "moments are float32 by type, and rounded to bfloat16 after every step"
    assert "cast to bfloat16 between steps" in finding.repair


def test_moments_rounded_once_on_a_resume_are_not_rounded_after_every_step() -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    train(policy, optimizer, 8)
    round_moments(optimizer, ("exp_avg", "exp_avg_sq"))
    (finding,) = judge([observe(policy, optimizer, first_step=8)]).findings
    assert (finding.code, finding.title) == ("BXP502", "moments are float32 by type and bfloat16 by value")


@pytest.mark.parametrize("after", [1, 2, 3])
def test_moments_of_a_state_that_is_loaded_between_observed_steps_are_not_rounded_after_every_step(after: int) -> None:
    """A program takes warm-up steps and then loads its checkpoint, which was saved in bfloat16 after step 50."""
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    steps = itertools.count(1)

    def load(*_: object) -> None:
        if next(steps) == after:
            round_moments(optimizer, ("exp_avg", "exp_avg_sq"))
            for state in optimizer.state.values():
                state["step"].fill_(50)

    optimizer.register_step_post_hook(load)
    judgement = judge([observe(policy, optimizer)])
    assert codes(judgement) == []


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.5), (0.0, 0.99)])
def test_moments_of_gradients_that_were_computed_in_bfloat16_are_not_rounded(betas: tuple[float, float]) -> None:
    policy = Policy()
    for parameter in policy.parameters():
        parameter.register_hook(lambda gradient: gradient.to(torch.bfloat16).float())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=betas)
    judgement = judge([observe(policy, optimizer)])
    assert codes(judgement) == []
    assert "BXP502" in judgement.clean


def test_embedding_rows_without_a_gradient_do_not_count_as_derived_again() -> None:
    """A bfloat16 checkpoint is trained further in float32; most tokens have not occurred yet."""
    judgement = resumed(rounded(Policy()))
    assert codes(judgement) == []
    assert "BXP501" in judgement.clean


def test_weights_that_come_back_through_bfloat16_were_derived_again() -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    train(policy, optimizer, 8)
    (finding,) = judge([observe(rounded(policy), optimizer, first_step=8)]).findings
    assert finding.code == "BXP501"
    assert "tokens.weight" in finding.evidence["names"]
    assert finding.evidence["steps before"] == 8
