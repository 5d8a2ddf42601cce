"""The units of a policy that FSDP1 shards."""

from __future__ import annotations

import pytest
from torch import nn

from benchbox.backends.fsdp1 import sharded_modules
from benchbox.optim import freeze
from benchbox.registry.contracts import Axes
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.registry.policies import build_policy


def units_of(policy: nn.Module, sharded: set[nn.Module]) -> dict[str, dict[str, bool]]:
    """Return unit -> parameter -> whether it trains, for the parameters in the flat parameter of the unit itself."""
    names = sorted((name for name, module in policy.named_modules() if module in sharded), key=len, reverse=True)
    units: dict[str, dict[str, bool]] = {}
    for name, parameter in policy.named_parameters():
        unit = next((prefix for prefix in names if name.startswith(f"{prefix}.")), "")
        units.setdefault(unit, {})[name] = parameter.requires_grad
    return units


@pytest.mark.parametrize("name", ["pi05", "pi0"])
@pytest.mark.parametrize("preset", FREEZE_PRESETS)
def test_no_flat_parameter_holds_both_what_trains_and_what_does_not(name: str, preset: str) -> None:
    """Autograd would compute gradients of all of it. In pi0 some parameters never train."""
    policy = build_policy(name, "tiny", Axes())
    assert isinstance(policy, nn.Module)
    freeze(policy, policy.parameter_roles(), FREEZE_PRESETS[preset])
    units = units_of(policy, sharded_modules(policy, policy.layer_units()))
    for unit, parameters in units.items():
        assert len(set(parameters.values())) == 1, unit


def test_layers_alone_are_units_where_everything_trains() -> None:
    policy = build_policy("pi05", "tiny", Axes())
    assert isinstance(policy, nn.Module)
    layers = policy.layer_units()
    assert sharded_modules(policy, layers) == {module for module in policy.modules() if isinstance(module, layers)}


def test_a_frozen_tower_is_not_cut_finer_than_it_must_be() -> None:
    """Its layers stay units; what stands around them is one more, and the projector another."""
    policy = build_policy("pi05", "tiny", Axes())
    assert isinstance(policy, nn.Module)
    layers = policy.layer_units()
    freeze(policy, policy.parameter_roles(), FREEZE_PRESETS["freeze_vision"])
    more = {module for module in sharded_modules(policy, layers) if not isinstance(module, layers)}
    assert more == {policy.get_submodule("model.vision"), policy.get_submodule("model.projector")}
