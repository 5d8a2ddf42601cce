"""What an observer finds out about a training that hands it nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchbox.observer.introspect.names import unwrapped_name
from benchbox.observer.observer import StepObserver
from benchbox.optim.masters import MasterWeightOptimizer
from tests.support.observed_trainings import ELEMENTS, layers, seen, table, train


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_adam_counts_parameters_gradients_and_both_moments(dtype, size):
    model = layers(getattr(torch, dtype))
    facts = seen(model, torch.optim.AdamW(model.parameters()), steps=1)
    whole = (4, ELEMENTS, ELEMENTS * size)
    assert table(facts) == {
        ("parameter", dtype): whole,
        ("gradient", dtype): whole,
        ("buffer", "float32"): (1, 3, 12),
        ("exp_avg", dtype): whole,
        ("exp_avg_sq", dtype): whole,
        ("step", "float32"): (4, 4, 16),
    }
    assert facts.rank == 0


def test_masters_are_found_beside_the_16_bit_parameters_they_stand_for():
    model = layers(torch.bfloat16)
    facts = seen(model, MasterWeightOptimizer(model.parameters(), fused=True))
    found = table(facts)
    assert found["parameter", "bfloat16"] == found["gradient", "bfloat16"] == (4, ELEMENTS, ELEMENTS * 2)
    assert found["master", "float32"] == found["master_gradient", "float32"] == (4, ELEMENTS, ELEMENTS * 4)
    assert ("parameter", "float32") not in found
    assert [(each.name, each.dtype, each.live, each.live_dtype) for each in facts.stepped] == [
        (name, "float32", False, "bfloat16") for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    ]
    assert facts.optimizer_chain == ("MasterWeightOptimizer", "AdamW")
    assert all(each.numbers.live_differs == 0.0 for each in facts.stepped)


def test_masters_of_an_optimizer_nobody_knows_are_told_by_their_shapes():
    """A wrapper that is no torch optimizer, with masters in a list of its own: linked, and found stale when they are."""

    class Wrapper:
        def __init__(self, parameters):
            self.live = list(parameters)
            self.copies = [parameter.detach().float() for parameter in self.live]
            self.real = torch.optim.AdamW(self.copies, lr=1e-2)

        def step(self):
            for parameter, master in zip(self.live, self.copies, strict=True):
                master.grad = parameter.grad.float()
            self.real.step()
            for parameter, master in zip(self.live, self.copies, strict=True):
                parameter.data.copy_(master)

        def zero_grad(self):
            for parameter in self.live:
                parameter.grad = None

    model = layers(torch.bfloat16)
    optimizer = Wrapper(model.parameters())
    facts = seen(model, optimizer)
    assert facts.optimizer_chain == ("Wrapper", "AdamW")
    assert [(each.name, each.live_dtype) for each in facts.stepped][:2] == [("0.weight", "bfloat16"), ("0.bias", "bfloat16")]
    assert all(each.numbers.live_differs_first == each.numbers.live_differs == 0.0 for each in facts.stepped)
    assert all(parameter.linked for parameter in facts.parameters)

    with torch.no_grad():
        model[0].weight.zero_()  # weights loaded behind the masters' back
    facts = seen(model, optimizer)
    stale = {each.name: each.numbers.live_differs_first for each in facts.stepped}
    assert stale["0.weight"] == 1.0
    assert stale["1.weight"] == 0.0


def test_stepped_tensors_carry_their_groups_options_and_their_state():
    model = layers()
    groups = [{"params": [model[0].weight], "betas": (0.9, 0.999)}, {"params": [model[1].weight], "weight_decay": 0.5}]
    facts = seen(model, torch.optim.AdamW(groups, lr=0.25, eps=1e-6))
    first, second = facts.stepped
    assert (first.name, first.betas, first.lr, first.eps, first.weight_decay) == ("0.weight", (0.9, 0.999), 0.25, 1e-6, 0.01)
    assert (second.name, second.weight_decay, second.step_count) == ("1.weight", 0.5, 6)
    assert first.state == {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
    assert facts.groups == ((0.01, 1), (0.5, 1))
    assert {parameter.name: parameter.linked for parameter in facts.parameters} == {
        "0.weight": True,
        "0.bias": False,
        "1.weight": True,
        "1.bias": False,
    }


def test_a_parameter_without_a_gradient_is_not_stepped():
    model = layers()
    model[0].requires_grad_(requires_grad=False)
    facts = seen(model, torch.optim.AdamW(model.parameters()))
    assert [each.name for each in facts.stepped] == ["1.weight", "1.bias"]
    assert table(facts)["parameter", "float32"][0] == 4


def test_wrapping_does_not_change_names():
    model = layers()
    wrapped = nn.Sequential()
    wrapped.add_module("module", model)  # as DDP and engines do
    assert seen(wrapped, torch.optim.AdamW(model.parameters())).stepped[0].name == "0.weight"


def test_a_flat_tensor_that_live_parameters_view_is_no_master():
    """Stepping it is stepping them."""
    model = layers(torch.bfloat16)
    flat = nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.bfloat16))
    for parameter, part in zip(model.parameters(), flat.detach().split([64, 8, 64, 8]), strict=True):
        parameter.data = part.view_as(parameter)
    optimizer = torch.optim.AdamW([flat])
    with StepObserver(source="command", steps=2) as observer:
        for _ in range(2):
            model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
            flat.grad = torch.ones_like(flat)
            optimizer.step()
    facts = observer.facts()
    assert [each.live for each in facts.stepped] == [True]
    assert not {"master", "master_gradient"} & {entry.kind for entry in facts.entries}


def test_an_optimizer_of_unknown_arithmetic_is_opaque():
    class Homemade(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model = layers()
    facts = seen(model, Homemade(model.parameters()))
    assert [opaque.optimizer for opaque in facts.opaque] == ["Homemade"]
    assert "unknown" in facts.opaque[0].reason


def test_an_optimizer_that_no_hook_sees_is_opaque():
    class Duck:
        """Steps, but is no torch optimizer."""

        def __init__(self, parameters):
            self.parameters = list(parameters)

        def step(self):
            for parameter in self.parameters:
                parameter.data -= parameter.grad

        def zero_grad(self):
            for parameter in self.parameters:
                parameter.grad = None

    model = layers()
    duck = Duck(model.parameters())
    with StepObserver(source="session", steps=2, model=model, optimizer=duck) as observer:
        train(model, duck, 2)
    facts = observer.facts()
    assert facts.stepped == ()
    assert "no step" in facts.opaque[0].reason
    assert facts.missing["stepped"] == "no optimizer step was seen"


def test_stochastic_rounding_and_kahan_buffers_are_recognised():
    class Rounding(torch.optim.SGD):
        bf16_stochastic_round = True

    class Kahan(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("kahan_comp", torch.zeros_like(parameter))
            return super().step(closure)

    for kind, name in ((Rounding, "stochastic rounding"), (Kahan, "Kahan")):
        model = layers(torch.bfloat16)
        facts = seen(model, kind(model.parameters(), lr=0.1))
        assert all(name in each.compensation for each in facts.stepped)
        assert facts.opaque == ()


def test_a_schedule_bound_to_a_discarded_optimizer_is_told_from_one_that_reaches_the_step():
    model = layers()
    discarded = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(discarded, lambda step: 0.5**step)
    facts = seen(model, torch.optim.AdamW(model.parameters(), lr=1.0), schedule=schedule)
    assert [each.reaches for each in facts.schedules] == [False]
    last = facts.steps[-1]
    assert (last.rates, last.schedule_rates) == ({"AdamW": (1.0,)}, {"LambdaLR": (0.5**5,)})

    schedule = torch.optim.lr_scheduler.LambdaLR(discarded, lambda step: 0.5**step)
    facts = seen(model, discarded, schedule=schedule)
    assert facts.schedules[-1].reaches


def test_micro_batches_clipping_and_the_dtype_that_accumulates_are_seen():
    model = layers(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(4):
            for _ in range(3):
                model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    facts = observer.facts()
    assert [step.micro_batches for step in facts.steps if step.micro_batches] == [3, 3, 3]
    assert facts.accumulated_in == ("bfloat16",)
    assert facts.steps[-1].max_norm == 0.5
    assert facts.steps[-1].reported_norm > 1.0
    assert facts.steps[-1].stepped_norm == pytest.approx(0.5, rel=0.01)


def test_loading_moments_into_16_bit_parameters_is_seen_to_cast_them():
    model = layers(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with StepObserver(source="command", steps=2) as observer:
        train(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["exp_avg"] = state["exp_avg"].float()
        optimizer.load_state_dict(saved)
        train(model, optimizer, 1)
    (load,) = observer.facts().loads
    assert (load.given["exp_avg"], load.held["exp_avg"]) == (("float32",), ("bfloat16",))


def test_autocast_and_the_dtype_of_products_are_seen():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(2, 8)).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = observer.facts()
    assert facts.autocast.active
    assert facts.autocast.dtype == "bfloat16"
    assert facts.products == {"bfloat16": 2}
    assert table(facts)["product", "bfloat16"] == (2, 2 * 2 * 8, 2 * 2 * 8 * 2)


def test_an_outer_optimizer_that_steps_an_inner_one_is_not_taken_for_one_that_steps():
    """A wrapper that is itself a torch optimizer, and calls the one inside by a name nobody knows."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 1.0})
            self.hidden = torch.optim.AdamW(self.param_groups[0]["params"], lr=1e-3)

        def step(self, closure=None):
            self.hidden.step()

    model = layers()
    facts = seen(model, Outer(model.parameters()))
    assert {each.optimizer for each in facts.stepped} == {"AdamW"}
    assert facts.optimizer_chain == ("Outer", "AdamW")
    assert len(facts.steps) == 6


def test_two_optimizers_that_take_turns_make_one_step_together():
    model = layers()
    pair = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)]

    class Both:
        def step(self):
            for each in pair:
                each.step()

        def zero_grad(self):
            model.zero_grad()

    facts = seen(model, Both())
    assert [step.step for step in facts.steps] == [1, 2, 3, 4, 5, 6]
    assert set(facts.steps[0].rates) == {"AdamW", "SGD"}
    assert len(facts.stepped) == 4


@pytest.mark.parametrize("wrapped", ["module.tower.weight", "_fsdp_wrapped_module.tower._checkpoint_wrapped_module.weight"])
def test_wrappers_leave_no_trace_in_names(wrapped):
    assert unwrapped_name(wrapped) == "tower.weight"
