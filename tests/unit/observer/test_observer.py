"""Facts of trainings that pass nothing to their observer."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchbox.audit.judge import judge
from benchbox.observer import recording
from benchbox.observer.introspect import masters
from benchbox.observer.observer import StepObserver
from benchbox.optim import MasterWeightOptimizer, chunks
from tests.support.observed_trainings import ELEMENTS, census_table, layers, observe_training, train, train_masters


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_adam_counts_parameters_gradients_and_both_moments(dtype, size):
    model = layers(getattr(torch, dtype))
    facts = observe_training(model, torch.optim.AdamW(model.parameters()), steps=1)
    total = (4, ELEMENTS, ELEMENTS * size)
    assert census_table(facts) == {
        ("parameter", dtype): total,
        ("gradient", dtype): total,
        ("buffer", "float32"): (1, 3, 12),
        ("exp_avg", dtype): total,
        ("exp_avg_sq", dtype): total,
        ("step", "float32"): (4, 4, 16),
    }
    assert facts.rank == 0


def test_stepped_tensors_carry_their_groups_options_and_their_state():
    model = layers()
    groups = [{"params": [model[0].weight], "betas": (0.9, 0.999)}, {"params": [model[1].weight], "weight_decay": 0.5}]
    facts = observe_training(model, torch.optim.AdamW(groups, lr=0.25, eps=1e-6))
    first_weight, second_weight = facts.stepped
    assert (first_weight.name, first_weight.betas, first_weight.lr) == ("0.weight", (0.9, 0.999), 0.25)
    assert (first_weight.eps, first_weight.weight_decay) == (1e-6, 0.01)
    assert (second_weight.name, second_weight.weight_decay, second_weight.step_count) == ("1.weight", 0.5, 6)
    assert first_weight.state == {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
    assert facts.groups == ((0.01, 1), (0.5, 1))
    assert {parameter.name: parameter.linked for parameter in facts.parameters} == {
        "0.weight": True,
        "0.bias": False,
        "1.weight": True,
        "1.bias": False,
    }


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.AdamW])
def test_numbers_that_an_optimizer_keeps_on_the_cpu_are_no_state_on_another_device(kind):
    """NAdam keeps mu_product there for tensors on any device."""
    model = torch.nn.Linear(8, 8, device="meta")
    optimizer = kind(model.parameters())
    with StepObserver(source="command", steps=2) as observer:
        for _ in range(2):
            model(torch.ones(2, 8, device="meta")).sum().backward()
            optimizer.step()
    facts = observer.facts()
    assert {tensor.live_device for tensor in facts.stepped} == {"meta"}
    assert all({*tensor.state_devices.values()} == {"meta"} for tensor in facts.stepped)
    assert "BXP105" in judge([facts]).clean


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_is_distinguished_from_a_loop(fused):
    model = layers(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    facts = observe_training(model, optimizer)
    assert {tensor.fused for tensor in facts.stepped} == {fused}
    assert ("BXP106" in judge([facts]).clean) == fused


def test_tensors_of_a_head_that_was_replaced_are_strangers():
    """The optimizer holds them, and nothing gives them a gradient."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    model[1] = torch.nn.Linear(8, 8)
    facts = observe_training(model, optimizer)
    assert facts.strangers == ("AdamW parameter 2", "AdamW parameter 3")
    assert [parameter.name for parameter in facts.parameters if not parameter.linked] == ["1.weight", "1.bias"]


class Scaled(torch.nn.Linear):
    """Has no bias and no mean, but what is registered after them."""

    def __init__(self):
        super().__init__(8, 8, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("mean", None)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        return super().forward(x) * self.scale


def test_parameters_and_buffers_that_a_module_does_without_hide_no_others():
    model = torch.nn.Sequential(Scaled(), Scaled())
    facts = observe_training(model, torch.optim.AdamW(model.parameters()))
    names = ["0.weight", "0.scale", "1.weight", "1.scale"]
    assert [parameter.name for parameter in facts.parameters] == [tensor.name for tensor in facts.stepped] == names
    assert [buffer.name for buffer in facts.buffers] == ["0.count", "1.count"]


def test_a_parameter_without_a_gradient_is_not_stepped():
    model = layers()
    model[0].requires_grad_(requires_grad=False)
    facts = observe_training(model, torch.optim.AdamW(model.parameters()))
    assert [tensor.name for tensor in facts.stepped] == ["1.weight", "1.bias"]
    assert census_table(facts)["parameter", "float32"][0] == 4


class Homemade(torch.optim.AdamW):
    """Signed gradients under the options of AdamW."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sgn()


class Disguised(torch.optim.AdamW):
    """The arithmetic of `Homemade` under the name and module of torch's step."""

    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure=None):
        Homemade.step(self, closure)


@pytest.mark.parametrize("kind", [Homemade, Disguised])
def test_arithmetic_is_known_by_the_code_that_runs_and_not_by_its_name(kind):
    model = layers(torch.bfloat16)
    assert [opaque.optimizer for opaque in observe_training(model, kind(model.parameters())).opaque] == [kind.__name__]


@pytest.mark.parametrize(("dtype", "lossless"), [(torch.float32, True), (torch.bfloat16, False)])
def test_an_optimizer_of_unknown_arithmetic_is_opaque_and_lossless_only_over_float32(dtype, lossless):
    """No update is computed beside it: its options are those of Adam, and its arithmetic may be another."""
    model = layers(dtype)
    facts = observe_training(model, Homemade(model.parameters()))
    assert [(opaque.optimizer, opaque.lossless) for opaque in facts.opaque] == [("Homemade", lossless)]
    assert "unknown" in facts.opaque[0].reason
    assert {tensor.numbers.updates for tensor in facts.stepped} == {0}
    assert "BXP102" in judge([facts]).not_judged


def test_two_optimizers_of_unknown_arithmetic_over_complex_parameters_are_lossless():
    """A complex64 number is two of float32."""
    weights = [torch.nn.Parameter(torch.ones(8, dtype=torch.complex64)) for _ in range(2)]
    model = torch.nn.ParameterList(weights)
    optimizers = [Homemade([weight]) for weight in model]
    with StepObserver(source="command", steps=2) as observer:
        for _ in range(2):
            sum(weight.abs().sum() for weight in model).backward()
            for optimizer in optimizers:
                optimizer.step()
    facts = observer.facts()
    assert [opaque.lossless for opaque in facts.opaque] == [True, True]
    (finding,) = judge([facts]).findings
    assert (finding.severity, finding.evidence["ranks"]) == ("info", [0])


def test_an_optimizer_of_unknown_arithmetic_over_masters_is_not_lossless():
    model = layers(torch.bfloat16)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = Homemade(masters)
    with StepObserver(source="command", steps=3) as observer:
        train_masters(model, masters, optimizer, 3)
    assert [opaque.lossless for opaque in observer.facts().opaque] == [False]


class Renamed(torch.optim.AdamW):
    pass


class Counting(torch.optim.AdamW):
    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("kind", [Renamed, Counting])
def test_a_subclass_that_leaves_the_arithmetic_to_adamw_is_no_unknown_optimizer(kind):
    model = layers()
    facts = observe_training(model, kind(model.parameters()))
    assert facts.opaque == ()
    assert all(tensor.numbers.updates for tensor in facts.stepped)


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


def test_a_schedule_bound_to_a_discarded_optimizer_is_distinguished_from_one_that_reaches_the_step():
    model = layers()
    discarded = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(discarded, lambda step: 0.5**step)
    facts = observe_training(model, torch.optim.AdamW(model.parameters(), lr=1.0), schedule=schedule)
    assert [schedule.reaches for schedule in facts.schedules] == [False]
    last_step = facts.steps[-1]
    assert (last_step.rates, last_step.schedule_rates) == ({"AdamW": (1.0,)}, {"LambdaLR": (0.5**5,)})

    schedule = torch.optim.lr_scheduler.LambdaLR(discarded, lambda step: 0.5**step)
    facts = observe_training(model, discarded, schedule=schedule)
    assert facts.schedules[-1].reaches


def test_autocast_and_the_dtype_of_matmuls_are_seen():
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
    assert not {"autocast", "products", "collectives"} & facts.missing.keys()
    assert census_table(facts)["product", "bfloat16"] == (2, 2 * 2 * 8, 2 * 2 * 8 * 2)


def test_products_that_record_gradients_are_counted_apart():
    model, teacher = layers(), layers().double()
    optimizer = torch.optim.AdamW(model.parameters())
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(4):
            with torch.no_grad():
                target = teacher(torch.ones(2, 8).double())
            (model(torch.ones(2, 8)) - target.float()).square().sum().backward()
            optimizer.step()
    facts = observer.facts()
    assert (facts.products, facts.products_with_gradient) == ({"float64": 2, "float32": 2}, {"float32": 2})


def test_a_model_that_is_cast_in_the_middle_is_judged_by_the_steps_since_then():
    """Updates that arrived in float32 would hide those that are lost in bfloat16."""
    model = layers()
    with StepObserver(source="command", steps=12) as observer:
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 4)
        train(model.bfloat16(), torch.optim.AdamW(model.parameters(), lr=1e-6), 8)
    facts = observer.facts()
    assert len(facts.stepped) == 4
    assert all(tensor.state["exp_avg"] == tensor.dtype == "bfloat16" for tensor in facts.stepped)
    (lost,) = [finding for finding in judge([facts]).findings if finding.code == "BXP102"]
    assert lost.evidence["edq"] < 0.5


def test_an_outer_optimizer_that_steps_an_inner_one_does_not_count_as_stepping():
    """A wrapper that is itself a torch optimizer, and keeps the inner one in an attribute of unknown name."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 1.0})
            self.hidden = torch.optim.AdamW(self.param_groups[0]["params"], lr=1e-3)

        def step(self, closure=None):
            self.hidden.step()

    model = layers()
    facts = observe_training(model, Outer(model.parameters()))
    assert {tensor.optimizer for tensor in facts.stepped} == {"AdamW"}
    assert facts.optimizer_chain == ("Outer", "AdamW")
    assert len(facts.steps) == 6


def test_two_optimizers_that_take_turns_make_one_step_together():
    model = layers()
    pair = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)]

    class Both:
        def step(self):
            for optimizer in pair:
                optimizer.step()

        def zero_grad(self):
            model.zero_grad()

    facts = observe_training(model, Both())
    assert [step.step for step in facts.steps] == [1, 2, 3, 4, 5, 6]
    assert set(facts.steps[0].rates) == {"AdamW", "SGD"}
    assert len(facts.stepped) == 4


def test_masters_that_are_stepped_bucket_by_bucket_are_looked_for_once_in_a_step(monkeypatch):
    """At each of the 900 buckets of a large policy it took 15 s a step on a GPU."""
    monkeypatch.setitem(chunks.BUCKET_ELEMENTS, "cpu", 16)
    searched = []
    monkeypatch.setattr(recording, "declared_masters", lambda *args: searched.append(1) or masters.declared_masters(*args))
    model = layers()
    full = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.AdamW, masters=full, fused=True)
    calls = []
    optimizer.inner.register_step_pre_hook(lambda *_: calls.append(1))
    facts = observe_training(model, optimizer)
    assert len(calls) > 3 * 6, "several buckets in each of 6 steps"
    assert len(searched) == 3, "the probed steps"
    assert {tensor.name for tensor in facts.stepped} == {name for name, _ in model.named_parameters()}


def test_a_mode_around_a_step_does_not_see_what_the_observer_computes():
    """Watching it would take longer than computing it, several times."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    names = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with StepObserver(source="session", steps=1, model=model, optimizer=optimizer) as observer:
        model(torch.randn(2, 8)).square().mean().backward()
        with Names():
            optimizer.step()
    (statistics, *_) = [tensor.numbers for tensor in observer.facts().stepped]
    assert statistics.gradient_squared > 0, "a norm was computed"
    assert "_fused_adamw_" in names or "lerp_" in names or "_foreach_lerp_" in names, "the step was seen"
    assert not names & {"linalg_vector_norm", "dot"}


def test_an_optimizer_of_another_model_steps_nothing_which_is_an_error():
    """Its tensors have the shapes of the model's, as masters have, and never a gradient."""
    model, other = layers(), layers()
    optimizer = torch.optim.AdamW(other.parameters())
    with StepObserver(source="command", steps=3, model=model, optimizer=optimizer) as observer:
        for _ in range(3):
            model(torch.randn(2, 8)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    (finding,) = [finding for finding in judge([observer.facts()]).findings if finding.severity == "error"]
    assert finding.code == "BXP404"
    assert finding.evidence["stepped"] == "nothing"
