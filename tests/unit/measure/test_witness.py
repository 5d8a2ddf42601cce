from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from benchbox.measure.witness.facts import RankFacts
from benchbox.measure.witness.updates import edq, expected_update
from benchbox.measure.witness.walk import own_name
from benchbox.measure.witness.witness import Witness
from benchbox.optim.masters import MasterWeightOptimizer

ELEMENTS = 2 * (8 * 8 + 8)


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    model.register_buffer("mean", torch.zeros(3))
    return model


def train(model, optimizer, steps, schedule=None, accumulation=1):
    losses = []
    for step in range(steps):
        for part in range(accumulation):
            torch.manual_seed(step * accumulation + part)
            batch = torch.randn(4, 8, dtype=next(model.parameters()).dtype)
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return losses


def seen(model, optimizer, steps=6, **options):
    """What a witness that is handed nothing finds out."""
    with Witness(source="command", steps=steps) as witness:
        train(model, optimizer, steps, **options)
    return witness.facts()


def table(facts):
    return {(entry.kind, entry.dtype): (entry.tensors, entry.elements, entry.bytes) for entry in facts.entries}


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
    with Witness(source="command", steps=2) as witness:
        for _ in range(2):
            model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
            flat.grad = torch.ones_like(flat)
            optimizer.step()
    facts = witness.facts()
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
    with Witness(source="session", steps=2, model=model, optimizer=duck) as witness:
        train(model, duck, 2)
    facts = witness.facts()
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


def test_the_expected_update_is_what_torch_does_in_float32():
    """Adam with coupled decay, AdamW, SGD with Nesterov's momentum, and maximising: to the last bits of float32."""
    kinds = [
        (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
        (torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 1e-2}),
    ]
    for kind, options in kinds:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(1000))
        optimizer = kind([weight], **options)
        for _ in range(3):
            weight.grad = torch.randn(1000)
            before = weight.detach().clone()
            state = copy.deepcopy(optimizer.state.get(weight, {}))
            state = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            update = expected_update(optimizer, optimizer.param_groups[0], state, before, weight.grad)
            optimizer.step()
            torch.testing.assert_close(before + update, weight.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("rate", "lowest", "highest"), [(1e-3, 0.85, 1.05), (1e-5, 0.0, 0.25)])
def test_updates_that_bfloat16_loses_are_counted(rate, lowest, highest):
    """Weights of N(0, 0.02), Adam's updates near the rate: next to none are lost at 1e-3, most at 1e-5."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    with Witness(source="command", steps=6) as witness:
        for _ in range(6):
            model(torch.randn(8, 256, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    numbers = witness.facts().stepped[0].numbers
    assert lowest <= edq(numbers.update_dot, numbers.update_squared) <= highest
    share = numbers.updates_lost / numbers.updates
    assert share < 0.35 if rate == 1e-3 else share > 0.7
    assert numbers.second_moment_stalled == 1.0, "0.999 rounds back for every mantissa"


def test_a_norm_weight_that_cannot_move_is_pinned_and_one_that_can_is_not():
    model = nn.LayerNorm(64).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    with Witness(source="command", steps=8) as witness:
        for step in range(8):
            torch.manual_seed(step)
            model(torch.randn(4, 64, dtype=torch.bfloat16)).sub(3).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pinned = {each.name: each.numbers.pinned_steps for each in witness.facts().stepped}
    assert pinned == {"weight": 8, "bias": 0}, "the bias starts at 0, where every update arrives"


def test_moments_that_went_through_bfloat16_are_known_by_their_bits():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 4)
    facts = seen(model, optimizer, steps=1)
    assert facts.stepped[0].numbers.steps_before == 4
    assert facts.stepped[0].numbers.bf16_valued["exp_avg_sq"] < 0.05
    for state in optimizer.state.values():
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())
    assert seen(model, optimizer, steps=1).stepped[0].numbers.bf16_valued["exp_avg_sq"] == 1.0


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
    with Witness(source="command", steps=4) as witness:
        for _ in range(4):
            for _ in range(3):
                model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    facts = witness.facts()
    assert [step.micro_batches for step in facts.steps if step.micro_batches] == [3, 3, 3]
    assert facts.accumulated_in == ("bfloat16",)
    assert facts.steps[-1].max_norm == 0.5
    assert facts.steps[-1].reported_norm > 1.0
    assert facts.steps[-1].stepped_norm == pytest.approx(0.5, rel=0.01)


def test_loading_moments_into_16_bit_parameters_is_seen_to_cast_them():
    model = layers(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with Witness(source="command", steps=2) as witness:
        train(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["exp_avg"] = state["exp_avg"].float()
        optimizer.load_state_dict(saved)
        train(model, optimizer, 1)
    (load,) = witness.facts().loads
    assert (load.given["exp_avg"], load.held["exp_avg"]) == (("float32",), ("bfloat16",))


def test_autocast_and_the_dtype_of_products_are_seen():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with Witness(source="command", steps=4) as witness:
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(2, 8)).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = witness.facts()
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


def test_watching_changes_no_bit_of_the_training():
    """Losses and weights of 12 steps with dropout, watched through 8 of them, against the same unwatched."""

    def run(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 8)).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        with Witness(source="command", steps=8 if watched else 0):
            for _ in range(12):
                loss = model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses, [parameter.detach() for parameter in model.parameters()], torch.get_rng_state()

    (losses, weights, state), (watched, watched_weights, watched_state) = run(watched=False), run(watched=True)
    assert losses == watched
    assert all(torch.equal(*pair) for pair in zip(weights, watched_weights, strict=True))
    assert torch.equal(state, watched_state)


@pytest.mark.parametrize("ending", ["steps over", "left early", "training fails"])
def test_nothing_of_the_witness_stays_behind(ending):
    originals = (torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer.load_state_dict, torch.amp.GradScaler.step)
    hooks = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks, _global_forward_pre_hooks]
    before = [list(each) for each in hooks]
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    witness = Witness(source="command", steps=4)
    if ending == "steps over":
        witness.install()
        train(model, optimizer, 6)
    elif ending == "left early":
        with witness:
            train(model, optimizer, 3)
    else:
        with pytest.raises(RuntimeError), witness:  # noqa: PT012
            train(model, optimizer, 1)
            raise RuntimeError
    left = [len(each) - len(old) for each, old in zip(hooks, before, strict=True)]
    assert left == [0, 0, 0]
    assert originals == (torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer.load_state_dict, torch.amp.GradScaler.step)
    assert witness.facts().stepped


def test_a_witness_that_stumbles_says_so_and_the_training_goes_on(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("in the witness")

    monkeypatch.setattr("benchbox.measure.witness.witness.Look.before", broken)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    facts = seen(model, optimizer)
    assert "ZeroDivisionError: in the witness" in facts.problems[0]
    assert optimizer.state[model[0].weight]["step"] == 6


def test_facts_survive_json():
    model = layers(torch.bfloat16)
    facts = seen(model, MasterWeightOptimizer(model.parameters()))
    assert RankFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


@pytest.mark.parametrize("wrapped", ["module.tower.weight", "_fsdp_wrapped_module.tower._checkpoint_wrapped_module.weight"])
def test_wrappers_leave_no_trace_in_names(wrapped):
    assert own_name(wrapped) == "tower.weight"


@pytest.mark.parametrize("rate", [1e-3, 1e-5])
def test_what_kahan_summation_puts_aside_counts_as_arrived(rate):
    """optimi's AdamW: every update is in the weight and its buffer together, at rates at which the weight alone takes none."""
    optimi = pytest.importorskip("optimi", reason="needs the extra lowbit")
    torch.manual_seed(0)
    model = nn.Linear(128, 128, bias=False).to(torch.bfloat16)
    optimizer = optimi.AdamW(model.parameters(), lr=rate, weight_decay=0.0, kahan_sum=True)
    facts = seen_on(model, optimizer, width=128)
    numbers = facts.stepped[0].numbers
    assert edq(numbers.update_dot, numbers.update_squared) == pytest.approx(1.0, abs=0.02)
    assert facts.stepped[0].betas == (0.9, 0.99)
    assert facts.stepped[0].compensation == "Kahan buffer kahan_comp"


def seen_on(model, optimizer, width):
    with Witness(source="command", steps=6) as witness:
        for step in range(6):
            torch.manual_seed(step)
            model(torch.randn(8, width, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return witness.facts()
