"""Statistics of the updates that steps made to weights."""

from __future__ import annotations

import copy
import pkgutil

import pytest
import torch
from torch import nn

from benchbox.observer.numerics.expected_update import expected_update
from benchbox.observer.observer import StepObserver
from benchbox.observer.stepped_tensors import edq
from tests.support.observed_trainings import layers, observe_training, train


def test_the_expected_update_is_what_torch_does_in_float32():
    """Adam with coupled decay, AdamW, SGD with Nesterov momentum, and maximize: to the last bits of float32."""
    kinds = [
        (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
        (torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
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


@pytest.mark.parametrize(
    ("library", "name"),
    [("torch.optim", name) for name in ("RAdam", "NAdam", "Adamax")]
    + [("optimi", name) for name in ("RAdam", "Ranger", "Lion", "Adan", "SGD")],
)
def test_optimizers_with_arithmetic_of_their_own_have_no_expected_update(library, name):
    """Their groups look like Adam's, whose arithmetic would call their updates lost, or fail."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = getattr(pytest.importorskip(library), name)([weight], lr=1e-3)
    assert expected_update(optimizer, optimizer.param_groups[0], {}, weight.detach(), torch.ones(4)) is None


@pytest.mark.parametrize("name", ["Lamb", "FusedLamb", "AdamP", "AdamWScheduleFree"])
def test_optimizers_of_libraries_that_are_not_installed_are_known_by_their_names(name):
    """One that is derived from them counts too; any other name with Adam's options has Adam's arithmetic."""
    weight = nn.Parameter(torch.ones(4))
    for derived, is_known in ((name, True), ("Own" + name, False)):
        kind = type(derived, (torch.optim.AdamW,), {})
        for each in (kind, type("Derived", (kind,), {})):
            optimizer = each([weight], lr=1e-3)
            update = expected_update(optimizer, optimizer.param_groups[0], {}, weight.detach(), torch.ones(4))
            assert (update is None) == is_known


@pytest.mark.parametrize(("rate", "lowest", "highest"), [(1e-3, 0.85, 1.05), (1e-5, 0.0, 0.25)])
def test_updates_that_bfloat16_loses_are_counted(rate, lowest, highest):
    """Weights of N(0, 0.02), Adam's updates near the rate: next to none are lost at 1e-3, most at 1e-5."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    with StepObserver(source="command", steps=6) as observer:
        for _ in range(6):
            model(torch.randn(8, 256, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    numbers = observer.facts().stepped[0].numbers
    assert lowest <= edq([numbers]) <= highest
    share = numbers.updates_lost / numbers.updates
    assert share < 0.35 if rate == 1e-3 else share > 0.7
    assert numbers.second_moment_stalled == 1.0, "0.999 rounds back for every mantissa"


def test_a_norm_weight_that_cannot_move_is_pinned_and_one_that_can_is_not():
    model = nn.LayerNorm(64).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    with StepObserver(source="command", steps=8) as observer:
        for step in range(8):
            torch.manual_seed(step)
            model(torch.randn(4, 64, dtype=torch.bfloat16)).sub(3).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pinned = {tensor.name: tensor.numbers.pinned_steps for tensor in observer.facts().stepped}
    assert pinned == {"weight": 8, "bias": 0}, "the bias starts at 0, where every update arrives"


def test_second_moments_that_underflow_are_counted_where_there_is_a_gradient():
    """In float16, 0.001 x (1e-3)^2 is zero."""
    model = nn.Linear(4, 1, bias=False).half()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    with StepObserver(source="command", steps=2) as observer:
        for _ in range(2):
            model.weight.grad = torch.tensor([[1.0, 1e-3, 0.0, 1e-3]]).half()
            optimizer.step()
    assert observer.facts().stepped[0].numbers.second_moment_zero == pytest.approx(2 / 3)


def test_moments_in_float8_are_read_like_others():
    """torch promotes no float8, and counts none of its elements."""

    def keep_moments_in(dtype):
        for state in optimizer.state.values():
            state |= {name: state[name].to(dtype) for name in ("exp_avg", "exp_avg_sq")}

    torch.manual_seed(0)
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: keep_moments_in(torch.float32))
    optimizer.register_step_post_hook(lambda *_: keep_moments_in(torch.float8_e5m2))
    facts = observe_training(model, optimizer)
    assert facts.problems == ()
    assert {tensor.state["exp_avg_sq"] for tensor in facts.stepped} == {"float8_e5m2"}
    assert all(tensor.numbers.updates and tensor.numbers.second_moment_zero is not None for tensor in facts.stepped)


def test_moments_that_went_through_bfloat16_are_recognised_by_their_bits():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 4)
    facts = observe_training(model, optimizer, steps=1)
    assert facts.stepped[0].numbers.steps_before == 4
    assert facts.stepped[0].numbers.bf16_valued["exp_avg_sq"] < 0.05
    for state in optimizer.state.values():
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())
    assert observe_training(model, optimizer, steps=1).stepped[0].numbers.bf16_valued["exp_avg_sq"] == 1.0


@pytest.mark.parametrize("name", ["optimi:AdamW", "benchbox.optim.kahan:KahanAdamW"])
@pytest.mark.parametrize("rate", [1e-3, 1e-5])
def test_the_compensation_of_kahan_summation_counts_as_arrived(rate, name):
    """Updates of optimi's AdamW and of its subclass: each is in the weight and its buffer together, at every rate."""
    pytest.importorskip("optimi", reason="needs the extra lowbit")
    torch.manual_seed(0)
    model = nn.Linear(128, 128, bias=False).to(torch.bfloat16)
    groups, options = [{"params": list(model.parameters())}], {"lr": rate, "weight_decay": 0.0}
    make = pkgutil.resolve_name(name)
    optimizer = make(groups, **options, **({"kahan_sum": True} if make.__module__.startswith("optimi") else {}))
    facts = observe_wide(model, optimizer, width=128)
    numbers = facts.stepped[0].numbers
    assert edq([numbers]) == pytest.approx(1.0, abs=0.02)
    assert facts.stepped[0].betas == (0.9, 0.99)
    assert facts.stepped[0].compensation == "Kahan buffer kahan_comp"


def observe_wide(model, optimizer, width):
    with StepObserver(source="command", steps=6) as observer:
        for step in range(6):
            torch.manual_seed(step)
            model(torch.randn(8, width, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return observer.facts()


def test_amsgrad_has_no_expected_update():
    """It divides by the largest second moment so far."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, amsgrad=True)
    assert expected_update(optimizer, optimizer.param_groups[0], {}, weight.detach(), torch.ones(4)) is None
