"""An observer changes nothing in a training, and removes itself completely."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from benchbox.observer.facts import RankFacts
from benchbox.observer.observer import StepObserver
from benchbox.optim.masters import MasterWeightOptimizer
from tests.support.observed_trainings import layers, observe_training, train


def test_watching_changes_no_bit_of_the_training():
    """Compare losses and weights of 12 steps with dropout, 8 of them watched, with an unwatched run."""

    def run(is_watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 8)).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        with StepObserver(source="command", steps=8 if is_watched else 0):
            for _ in range(12):
                loss = model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses, [parameter.detach() for parameter in model.parameters()], torch.get_rng_state()

    (losses, weights, state), (watched_losses, watched_weights, watched_state) = run(is_watched=False), run(is_watched=True)
    assert losses == watched_losses
    assert all(torch.equal(*pair) for pair in zip(weights, watched_weights, strict=True))
    assert torch.equal(state, watched_state)


@pytest.mark.parametrize("ending", ["steps over", "left early", "training fails"])
def test_nothing_of_the_observer_remains_installed(ending):
    originals = (torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer.load_state_dict, torch.amp.GradScaler.step)
    hooks = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks, _global_forward_pre_hooks]
    before = [list(registry) for registry in hooks]
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    observer = StepObserver(source="command", steps=4)
    if ending == "steps over":
        observer.install()
        train(model, optimizer, 6)
    elif ending == "left early":
        with observer:
            train(model, optimizer, 3)
    else:
        with pytest.raises(RuntimeError), observer:  # noqa: PT012
            train(model, optimizer, 1)
            raise RuntimeError
    remaining = [len(registry) - len(original) for registry, original in zip(hooks, before, strict=True)]
    assert remaining == [0, 0, 0]
    assert originals == (torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer.load_state_dict, torch.amp.GradScaler.step)
    assert observer.facts().stepped


@pytest.mark.parametrize("ending", ["steps over", "left early", "observer fails"])
def test_an_observer_that_is_done_keeps_no_model_alive(monkeypatch, ending):
    """Its process may train for days after the observed steps, on another model."""
    if ending == "observer fails":
        monkeypatch.setattr("benchbox.observer.recording.StepRecorder.end_step", lambda _: 1 / 0)
    with StepObserver(source="command", steps=8 if ending == "left early" else 4) as observer:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(6):
            model(torch.randn(4, 8)).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    released = [weakref.ref(kept) for kept in (model, optimizer, model[0].weight, norm)]
    del model, optimizer, norm
    gc.collect()
    assert [reference() for reference in released] == [None] * 4
    assert observer.steps_observed > 0
    assert observer.facts().stepped


def test_an_observer_that_fails_reports_it_and_the_training_continues(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("in the observer")

    monkeypatch.setattr("benchbox.observer.recording.TensorProbe.before_step", broken)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    facts = observe_training(model, optimizer)
    assert "ZeroDivisionError: in the observer" in facts.problems[0]
    assert optimizer.state[model[0].weight]["step"] == 6


@pytest.mark.parametrize("steps", [6, 8], ids=["steps over", "left early"])
def test_an_observer_that_fails_at_its_end_keeps_its_facts(monkeypatch, steps):
    def broken(_):
        raise ZeroDivisionError("in the observer")

    monkeypatch.setattr("benchbox.observer.recording.StepRecorder.finish", broken)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with StepObserver(source="command", steps=steps) as observer:
        train(model, optimizer, 7)
    facts = observer.facts()
    assert "ZeroDivisionError: in the observer" in facts.problems[0]
    assert len(facts.stepped) == 4


def test_an_observer_that_fails_at_the_end_of_a_step_begins_no_other_step(monkeypatch):
    """Beginning one would patch the gradient clipping of FSDP1 again, for the rest of the training."""
    monkeypatch.setattr("benchbox.observer.recording.StepRecorder.end_step", lambda _: 1 / 0)
    original = FullyShardedDataParallel.clip_grad_norm_
    model = layers()
    facts = observe_training(model, torch.optim.AdamW(model.parameters()))
    assert FullyShardedDataParallel.clip_grad_norm_ is original
    assert len(facts.steps) == 1
    assert len(facts.problems) == 1


def test_a_failure_of_an_observer_that_has_stopped_leaves_its_facts_alone(monkeypatch):
    """A call of the training may be running when the observer stops, and be recorded at its end."""
    monkeypatch.setattr("benchbox.observer.recording.StepRecorder.end_step", lambda _: 1 / 0)
    model = layers()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    with StepObserver(source="command", steps=4) as observer:
        monkeypatch.setattr("benchbox.observer.hooks.calls._overflowed", lambda *_: 1 / 0 if observer.has_failed else False)
        for _ in range(4):
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    facts = observer.facts()
    assert len(facts.stepped) == 4
    assert [problem.partition(":")[0] for problem in facts.problems] == ["end_step"]


def test_facts_survive_json():
    model = layers(torch.bfloat16)
    facts = observe_training(model, MasterWeightOptimizer(model.parameters()))
    assert RankFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
