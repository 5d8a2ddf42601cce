"""Trainings that use torch in ways that the observer has to put up with: it neither fails nor sees less than they do."""

from __future__ import annotations

import gc
import threading
import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchbox.audit.judge import judge
from benchbox.observer.observer import StepObserver
from tests.support.observed_trainings import ELEMENTS, census_table, layers, observe_training, train, train_masters


class Trainer:
    """Has methods with the names of an optimizer's attributes."""

    def __init__(self, model):
        self.model, self.calls = model, []
        self.optimizer = torch.optim.AdamW(self.param_groups(), lr=1e-3)

    def param_groups(self):
        return [{"params": list(self.model.parameters())}]

    def stepped(self):
        self.calls.append("stepped")

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


def test_methods_of_a_trainer_are_not_taken_for_those_of_an_optimizer_nor_called() -> None:
    model = layers()
    trainer = Trainer(model)
    facts = observe_training(model, trainer)
    assert facts.problems == ()
    assert (facts.optimizer_chain, facts.groups) == (("Trainer", "AdamW"), ((0.01, 4),))
    assert trainer.calls == []


@pytest.mark.parametrize(("attribute", "value"), [("inner", 5), ("optimizer", "adamw")])
def test_an_optimizer_with_a_number_or_a_string_where_wrappers_have_an_optimizer_is_observed(attribute, value) -> None:
    model = layers(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    setattr(optimizer, attribute, value)
    assert len(observe_training(model, optimizer).stepped) == 4


class Counting(torch.optim.Optimizer):
    """Counts the steps of every element, under the names of Adam."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "betas": None, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            count = self.state[parameter].setdefault("step", torch.zeros_like(parameter)).add_(1)
            parameter.sub_(parameter.grad / count, alpha=1e-3)


def test_the_options_and_counts_of_an_optimizer_need_not_be_numbers() -> None:
    model = layers()
    facts = observe_training(model, Counting(model.parameters()))
    assert facts.problems == ()
    assert {(tensor.betas, tensor.step_count) for tensor in facts.stepped} == {(None, None)}


class Homemade(torch.optim.Optimizer):
    """Holds a tensor where other optimizers hold a dictionary, and no weight decay."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "weight_decay": None})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = self.state.get(parameter, torch.zeros_like(parameter)) + parameter.grad
            parameter.sub_(self.state[parameter], alpha=1e-3)


def test_the_state_of_an_optimizer_may_be_a_tensor_and_its_decay_none() -> None:
    model = layers()
    facts = observe_training(model, Homemade(model.parameters()))
    assert facts.problems == ()
    assert census_table(facts)["state", "float32"] == (4, ELEMENTS, 4 * ELEMENTS)
    assert facts.groups == ((0.0, 4),)


def test_a_lazy_part_that_is_never_called_hides_nothing_else() -> None:
    model = layers()
    model.add_module("unused", nn.LazyLinear(4))
    model.forward = lambda x: model[1](model[0](x))
    facts = observe_training(model, torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()]))
    assert facts.problems == ()
    assert census_table(facts)["parameter", "float32"] == (4, ELEMENTS, 4 * ELEMENTS)


@pytest.mark.parametrize("compile_model", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(4, 8))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_of_torchscript_are_observed(compile_model) -> None:
    model = compile_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    facts = observe_training(model, torch.optim.AdamW(model.parameters()))
    assert facts.problems == ()
    assert census_table(facts)["parameter", "float32"] == (4, ELEMENTS, 4 * ELEMENTS)
    assert [tensor.live for tensor in facts.stepped] == 4 * [True]


def test_a_model_that_computes_with_other_tensors_in_place_of_its_parameters_gives_no_warning() -> None:
    """Torch warns where the gradient of an intermediate result is asked for."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(), StepObserver(source="command", steps=3) as observer:
        warnings.simplefilter("error")
        for _ in range(3):
            for _ in range(2):
                scaled = {name: 0.5 * parameter for name, parameter in model.named_parameters()}
                torch.func.functional_call(model, scaled, (torch.ones(2, 8),)).sum().backward()
            optimizer.step()
    assert observer.facts().problems == ()


@pytest.mark.parametrize("frozen_in_step", [0, 1])
def test_a_model_is_found_after_the_garbage_collector_was_frozen(frozen_in_step) -> None:
    """Trainings freeze it to be spared its pauses; frozen objects are listed no more."""
    model = layers()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    try:
        with StepObserver(source="command", steps=6) as observer:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for step in range(6):
                if step == frozen_in_step:
                    gc.freeze()
                train(model, optimizer, 1, schedule)
                if step == 2:
                    optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-3)
                    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        facts = observer.facts()
    finally:
        gc.unfreeze()
    assert len(facts.parameters) == len(facts.stepped) == 4
    assert all(tensor.live for tensor in facts.stepped)
    assert [schedule.reaches for schedule in facts.schedules] == [True, True]


@pytest.mark.usefixtures("restored_hooks")
def test_optimizers_that_step_at_the_same_time_in_threads_are_both_observed() -> None:
    """Neither wraps the other one, whichever of them ends first."""
    inside, outside = threading.Event(), threading.Event()
    models = [layers(), layers()]
    first, second = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models)

    def wait(*_) -> None:
        inside.set()
        outside.wait(10)

    with StepObserver(source="command", steps=6) as observer:
        first.register_step_pre_hook(wait)
        for _ in range(7):
            for model in models:
                model(torch.ones(2, 8)).square().sum().backward()
            inside.clear()
            outside.clear()
            thread = threading.Thread(target=first.step)
            thread.start()
            assert inside.wait(10)
            second.step()
            outside.set()
            thread.join()
    facts = observer.facts()
    assert [step.step for step in facts.steps] == [1, 2, 3, 4, 5, 6]
    assert len(facts.stepped) == 8
    assert facts.missing["products"] == "the training steps its optimizers in several threads"


@pytest.mark.parametrize(("method", "arguments"), [("half", ()), ("bfloat16", ()), ("to", (torch.float16,))])
def test_a_model_that_is_cast_after_its_last_step_was_trained_as_it_was_before(method, arguments) -> None:
    """A short training that saves its weights in 16 bits ends before the observer does."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with StepObserver(source="command", steps=20) as observer:
        train(model, optimizer, 4)
        getattr(model, method)(*arguments)
    facts = observer.facts()
    assert census_table(facts)["parameter", "float32"][0] == 4
    assert judge([facts]).failing(warnings=True) == ()


def test_an_observer_that_fails_after_a_model_was_cast_says_so() -> None:
    model = layers()
    with StepObserver(source="command", steps=20) as observer:
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 4)
        model.half()
        with pytest.raises(ZeroDivisionError) as failure:
            _ = 1 / 0
        observer.fail(failure.value)
    assert [problem.startswith("hooks: ZeroDivisionError") for problem in observer.facts().problems] == [True]


def masters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().float().requires_grad_() for parameter in model.parameters()]


def test_masters_that_never_arrived_are_found_where_the_model_is_cast_after_one_step() -> None:
    model = layers(torch.bfloat16)
    masters = masters_of(model)
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    with StepObserver(source="command", steps=20) as observer:
        train_masters(model, masters, optimizer, 1, write_back=lambda *_: None)
        model.float()
    assert "BXP104" in {finding.code for finding in judge([observer.facts()]).findings}


def test_an_optimizer_of_a_copy_is_found_where_the_model_is_cast_after_the_last_step() -> None:
    model = layers()
    copy = deepcopy(model)
    optimizer = torch.optim.AdamW(copy.parameters(), lr=1e-3)
    with StepObserver(source="command", steps=20) as observer:
        for _ in range(14):
            model(torch.ones(2, 8)).square().sum().backward()
            for parameter, other in zip(copy.parameters(), model.parameters(), strict=True):
                parameter.grad = other.grad.clone()
            optimizer.step()
        model.half()
    assert "BXP404" in {finding.code for finding in judge([observer.facts()]).findings}


def test_float16_that_is_recomputed_by_older_checkpointing_is_seen_beside_a_float32_head() -> None:
    """Its forward pass records no gradients."""
    body, head = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).half(), nn.Linear(8, 1)
    masters = masters_of(body)
    optimizer = torch.optim.AdamW([*masters, *head.parameters()], lr=1e-4)
    with StepObserver(source="command", steps=3) as observer:
        for _ in range(3):
            inputs = torch.ones(2, 8, dtype=torch.float16, requires_grad=True)
            head(checkpoint(body, inputs, use_reentrant=True).float()).square().mean().backward()
            for master, parameter in zip(masters, body.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            optimizer.zero_grad()
            for master, parameter in zip(masters, body.parameters(), strict=True):
                parameter.data.copy_(master)
    assert "BXP305" in {finding.code for finding in judge([observer.facts()]).findings}


def test_weights_that_are_restored_after_the_last_step_are_no_stale_ones() -> None:
    """Nor are those that are cast and cast back in the middle of an update."""
    model = layers(torch.bfloat16)
    masters = masters_of(model)
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def write_back(parameter: torch.Tensor, master: torch.Tensor) -> None:
        model.float().bfloat16()
        parameter.data.copy_(master)

    with StepObserver(source="command", steps=20) as observer:
        train_masters(model, masters, optimizer, 4, write_back)
        model.load_state_dict(best)
    assert {tensor.numbers.live_differs for tensor in observer.facts().stepped} == {0.0}


def test_gradients_that_overflow_in_one_step_leave_the_other_steps_judged() -> None:
    model = layers(torch.bfloat16)
    model[0].weight.register_hook(lambda gradient: gradient.fill_(torch.inf) if len(observer._state.steps) == 2 else gradient)
    with StepObserver(source="command", steps=6) as observer:
        train(model, torch.optim.SGD(model.parameters(), lr=1e-5), 6)
    (lost,) = [finding for finding in judge([observer.facts()]).findings if finding.code == "BXP102"]
    assert 0.0 <= lost.evidence["edq"] < 0.5


def test_parameters_of_two_models_with_the_same_name_are_not_merged() -> None:
    """One that is pinned would hide behind the other one."""
    models = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.AdamW([parameter for model in models for parameter in model.parameters()])
    with StepObserver(source="command", steps=2) as observer:
        for _ in range(2):
            models[1](models[0](torch.ones(2, 8))).sum().backward()
            optimizer.step()
    assert [(tensor.name, tensor.elements) for tensor in observer.facts().stepped] == 2 * [("weight", 64), ("bias", 8)]
