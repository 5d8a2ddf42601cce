"""Rules on clipping: of several optimizers, of scaled gradients, and of weights that nobody trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchbox.audit.judge import judge
from benchbox.observer.observer import StepObserver
from tests.support.audited_trainings import STEPS, failing, loss_of, observe
from tests.support.observed_trainings import layers

LIMIT = 0.01

pytestmark = pytest.mark.usefixtures("one_thread")


def adversaries(clipped_late: str | None = None):
    """Return a training of a generator and a critic, each clipped to a limit of its own right before its step."""

    def training() -> nn.Module:
        models = layers()
        generator, critic = models
        first = torch.optim.AdamW(generator.parameters(), lr=1e-3)
        second = torch.optim.SGD(critic.parameters(), lr=1e-3)
        for _ in range(STEPS + 1):
            models.zero_grad()
            loss_of(models).backward()
            for name, model, optimizer, limit in (("critic", critic, second, 1e-4), ("generator", generator, first, LIMIT)):
                if clipped_late == name:
                    optimizer.step()
                nn.utils.clip_grad_norm_(model.parameters(), limit)
                if clipped_late != name:
                    optimizer.step()
        return models

    return training


def test_each_of_two_optimizers_is_compared_with_its_own_clipping() -> None:
    judgement = judge([observe(adversaries())])
    assert failing(judgement) == []
    assert "BXP304" in judgement.clean


@pytest.mark.parametrize("early", [False, True])
def test_clipping_of_one_optimizer_is_not_compared_with_the_steps_of_another(early: bool) -> None:
    """A generator is clipped and stepped once for two steps of its critic, which is never clipped.

    Clipped early, it is so before the second of these steps.
    """

    def training() -> nn.Module:
        models = layers()
        generator, critic = models
        first = torch.optim.AdamW(generator.parameters(), lr=1e-3)
        second = torch.optim.SGD(critic.parameters(), lr=1e-3)
        for _ in range(STEPS):
            for turn in range(2):
                models.zero_grad()
                loss_of(models).backward()
                if early and turn == 1:
                    nn.utils.clip_grad_norm_(generator.parameters(), 1e-4)
                second.step()
            if not early:
                nn.utils.clip_grad_norm_(generator.parameters(), 1e-4)
            first.step()
        return models

    facts = observe(training)
    assert failing(judge([facts])) == []
    assert any(step.max_norm == 1e-4 and step.stepped_norm == pytest.approx(1e-4, rel=0.01) for step in facts.steps)


@pytest.mark.parametrize(("name", "limit"), [("critic", 1e-4), ("generator", LIMIT)])
def test_clipping_after_the_step_of_one_of_two_optimizers_is_found(name: str, limit: float) -> None:
    (finding,) = judge([observe(adversaries(name))]).findings
    assert (finding.code, finding.evidence["clipped to"]) == ("BXP304", limit)


def scaled(*, unscale: bool, fused: bool = False, limit: float = LIMIT):
    def training() -> nn.Module:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(STEPS + 1):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            scaler.step(optimizer)
            scaler.update()
        return model

    return training


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_before_the_gradients_are_unscaled_is_found(fused: bool) -> None:
    (finding,) = judge([observe(scaled(unscale=False, fused=fused))]).findings
    assert (finding.code, finding.severity, finding.evidence["loss scale"]) == ("BXP304", "error", 1024.0)
    assert "before they are unscaled" in finding.title
    assert "unscale_" in finding.repair


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_of_unscaled_gradients_is_clean(fused: bool) -> None:
    judgement = judge([observe(scaled(unscale=True, fused=fused))])
    assert judgement.findings == ()
    assert "BXP304" in judgement.clean


def test_a_limit_that_includes_the_loss_scale_is_clean() -> None:
    assert judge([observe(scaled(unscale=False, limit=LIMIT * 1024.0 * 200))]).findings == ()


def test_clipping_for_a_step_that_the_scaler_skips_is_not_compared_with_a_later_step() -> None:
    """The next step is not clipped, as in a training that clips only in its warm-up."""

    def training() -> nn.Module:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            scaler.scale(loss_of(model) * (float("inf") if step == 0 else 1.0)).backward()
            scaler.unscale_(optimizer)
            if step == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            scaler.step(optimizer)
            scaler.update()
        return model

    torch.manual_seed(0)
    with StepObserver(source="command", steps=STEPS) as observer:
        training()
    judgement = judge([observer.facts()])
    assert failing(judgement) == []
    assert judgement.not_judged["BXP304"] == "no clipping was seen"


@pytest.mark.parametrize(
    ("clipped", "codes"), [("copy", ["BXP304"]), ("frozen", []), ("model", []), ("both", []), ("inputs", [])]
)
def test_clipping_of_an_old_copy_of_the_weights_is_found(clipped: str, codes: list[str]) -> None:
    """Clipping of a frozen part of the model does nothing, and that of inputs, as for adversarial ones, is meant for them."""

    def training() -> nn.Module:
        model, copy = layers(), layers()
        frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW(model.parameters())
        lists = {"copy": [copy], "frozen": [frozen], "model": [model], "both": [copy, model], "inputs": []}[clipped]
        for _ in range(STEPS):
            batch = torch.randn(4, 8, requires_grad=True)
            (100 * model(frozen(batch)).square().mean()).backward()
            for module in lists:
                nn.utils.clip_grad_norm_(module.parameters(), LIMIT)
            if clipped == "inputs":
                nn.utils.clip_grad_norm_([batch], LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        return model

    assert failing(judge([observe(training)])) == codes
