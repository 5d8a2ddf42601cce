"""Parameter groups are planned before wrapping, presets freeze towers, and the norm is float32."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from benchbox.errors import ConfigurationError, UnsupportedError
from benchbox.optim import bind_groups, clip_coefficient, freeze, plan_groups, squared_norm
from benchbox.registry.contracts import Role
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.spec.optim import GroupSpec, OptimSpec


def policy() -> nn.ModuleDict:
    return nn.ModuleDict({"tower": nn.Linear(4, 4), "head": nn.Linear(4, 2)})


ROLES = {
    "tower.weight": Role("backbone", decay=True),
    "tower.bias": Role("backbone", decay=False),
    "head.weight": Role("head", decay=True),
    "head.bias": Role("head", decay=False),
}


def test_four_groups_each_with_its_rate_and_decay() -> None:
    """Backbone and head, decayed and not, in a fixed order."""
    plans = plan_groups(policy(), ROLES, OptimSpec(lr=1e-5, head_lr=1e-4, weight_decay=0.1))
    assert [(plan.names, plan.lr, plan.weight_decay) for plan in plans] == [
        (("tower.weight",), 1e-5, 0.1),
        (("tower.bias",), 1e-5, 0.0),
        (("head.weight",), 1e-4, 0.1),
        (("head.bias",), 1e-4, 0.0),
    ]


def test_the_role_of_a_parameter_decides_its_decay_and_not_its_shape() -> None:
    """A vector may be decayed, and a matrix such as an embedding exempt."""
    roles = {"tower.weight": Role("backbone", decay=False), "tower.bias": Role("backbone", decay=True)} | {
        name: role for name, role in ROLES.items() if name.startswith("head")
    }
    plans = plan_groups(policy(), roles, OptimSpec(weight_decay=0.1))
    decay = {name: plan.weight_decay for plan in plans for name in plan.names}
    assert (decay["tower.weight"], decay["tower.bias"]) == (0.0, 0.1)


def test_decay_survives_sharding_that_flattens_everything() -> None:
    """Bound by name after wrapping, a matrix that became a flat shard is still decayed (VITRA's split lost it)."""
    plans = plan_groups(policy(), ROLES, OptimSpec(weight_decay=0.1))
    flat = {name: nn.Parameter(parameter.flatten()) for name, parameter in policy().named_parameters()}
    groups = bind_groups(plans, flat)
    assert {group["name"]: (group["weight_decay"], group["params"][0].dim()) for group in groups} == {
        "backbone, decayed": (0.1, 1),
        "backbone, not decayed": (0.0, 1),
        "head, decayed": (0.1, 1),
        "head, not decayed": (0.0, 1),
    }


def test_frozen_parameters_are_in_no_group() -> None:
    """The optimizer gets trainable parameters only, and no empty group."""
    frozen = policy()
    frozen["tower"].requires_grad_(False)
    assert [plan.name for plan in plan_groups(frozen, ROLES, OptimSpec())] == ["head, decayed", "head, not decayed"]


def test_the_first_pattern_that_matches_sets_hyperparameters_and_the_role_sets_the_others() -> None:
    patterns = (
        GroupSpec(match="*.bias", lr=3e-5),
        GroupSpec(match="tower.*", weight_decay=0.3, betas=(0.8, 0.9)),
    )
    optim = OptimSpec(lr=1e-5, head_lr=1e-4, weight_decay=0.1, head_weight_decay=0.2, groups=patterns)
    plans = plan_groups(policy(), ROLES, optim)
    assert [(plan.name, plan.names, plan.lr, plan.weight_decay, plan.betas) for plan in plans] == [
        ("*.bias: backbone, not decayed", ("tower.bias",), 3e-5, 0.0, optim.betas),
        ("*.bias: head, not decayed", ("head.bias",), 3e-5, 0.0, optim.betas),
        ("tower.*: backbone, decayed", ("tower.weight",), 1e-5, 0.3, (0.8, 0.9)),
        ("head, decayed", ("head.weight",), 1e-4, 0.2, optim.betas),
    ]


def test_patterns_that_select_nothing_are_all_reported_with_the_nearest_names() -> None:
    patterns = (GroupSpec(match="towr.*", lr=1.0), GroupSpec(match="head.*", lr=1.0), GroupSpec(match="head.bias", lr=1.0))
    with pytest.raises(ConfigurationError) as caught:
        plan_groups(policy(), ROLES, OptimSpec(groups=patterns))
    assert str(caught.value).splitlines() == [
        "optim.groups[0].match: 'towr.*' matches no trainable parameter; did you mean 'tower.*'?",
        "optim.groups[2].match: 'head.bias' matches only parameters that earlier patterns match; move it up",
    ]


@pytest.mark.parametrize(("part", "scope"), [("backbone", "everything"), ("head", "nothing")])
def test_freezing_everything_or_nothing_at_first_is_refused(part: Literal["backbone", "head"], scope: str) -> None:
    roles = {name: Role(part, decay=True) for name in ROLES}
    with pytest.raises(
        ConfigurationError, match=f"optim.freeze_backbone_steps: would freeze {scope} that trains of ModuleDict"
    ):
        plan_groups(policy(), roles, OptimSpec(freeze_backbone_steps=3))


def test_a_parameter_without_a_role_is_an_error_with_its_name() -> None:
    with pytest.raises(ConfigurationError, match=r"head\.bias has no role"):
        plan_groups(policy(), {name: role for name, role in ROLES.items() if name != "head.bias"}, OptimSpec())


@pytest.mark.parametrize("role", [Role("expert", decay=True), "head"])  # type: ignore[arg-type]
def test_a_role_of_another_part_is_refused_as_its_parameter_would_not_be_trained(role: object) -> None:
    with pytest.raises(ConfigurationError, match=r"parameter head\.bias has the role .*; its part is backbone or head"):
        plan_groups(policy(), {**ROLES, "head.bias": role}, OptimSpec())  # type: ignore[dict-item]


TOWERS = ("vision", "backbone", "expert", "head")


def towers(*names: str) -> tuple[nn.ModuleDict, dict[str, Role]]:
    """Build a policy with a layer for each tower, and its roles."""
    roles = {
        f"{name}.{kind}": Role("head" if name in ("expert", "head") else "backbone", decay=kind == "weight", tower=name)
        for name in names
        for kind in ("weight", "bias")
    }
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in names}), roles


def training(policy: nn.Module) -> list[str]:
    return list(dict.fromkeys(name.split(".")[0] for name, p in policy.named_parameters() if p.requires_grad))


@pytest.mark.parametrize(
    ("preset", "trains"),
    [("full", list(TOWERS)), ("freeze_vision", ["backbone", "expert", "head"]), ("train_expert_only", ["expert", "head"])],
)
def test_a_preset_freezes_towers(preset: str, trains: list[str]) -> None:
    policy, roles = towers(*TOWERS)
    freeze(policy, roles, FREEZE_PRESETS[preset])
    assert training(policy) == trains


@pytest.mark.parametrize("preset", FREEZE_PRESETS)
def test_what_a_policy_keeps_fixed_itself_no_preset_trains(preset: str) -> None:
    policy, roles = towers(*TOWERS)
    policy["head"].requires_grad_(False)
    freeze(policy, roles, FREEZE_PRESETS[preset])
    assert "head" not in training(policy)


@pytest.mark.parametrize(
    ("preset", "has", "because"),
    [
        ("train_expert_only", ("vision", "head"), "needs a tower expert, and ModuleDict trains vision, head"),
        ("freeze_vision", ("backbone", "head"), "needs a tower vision, and ModuleDict trains backbone, head"),
        ("freeze_vision", ("vision",), "would freeze everything of ModuleDict"),
        ("train_expert_only", ("expert", "head"), "would freeze nothing of ModuleDict"),
    ],
)
def test_a_preset_that_means_nothing_for_a_policy_is_refused(preset: str, has: tuple[str, ...], because: str) -> None:
    """And the policy is left as it was."""
    policy, roles = towers(*has)
    with pytest.raises(UnsupportedError, match=f"freeze {preset} {because}"):
        freeze(policy, roles, FREEZE_PRESETS[preset])
    assert training(policy) == list(has)


def test_the_norm_of_bfloat16_gradients_is_float32() -> None:
    """Summed in float32 over tensors and elements; in bfloat16 the same sum is off by more than half a percent."""
    gradients = [torch.full((257,), 1.01, dtype=torch.bfloat16) for _ in range(301)]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(squared_norm(gradients, torch.device("cpu"))) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("norm", "wanted"), [(0.5, 1.0), (4.0, 0.25)])
def test_clipping_only_shrinks(norm: float, wanted: float) -> None:
    assert float(clip_coefficient(torch.tensor(norm), 1.0)) == pytest.approx(wanted, rel=1e-5)
