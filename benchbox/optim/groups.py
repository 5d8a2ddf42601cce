"""Frozen parameters, and parameter groups by part (backbone or head) and weight decay.

Both are decided from names and shapes before the policy is wrapped. After sharding, every parameter may be a 1-D shard, and a
rule such as "decay parameters with two dimensions" then silently decays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.errors import ConfigurationError, Problem, UnsupportedError
from benchbox.observer.introspect.names import live_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from benchbox.registry.contracts import Role
    from benchbox.registry.freezing import FreezePreset
    from benchbox.spec.cell import OptimSpec


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Plan of a parameter group: the names of its parameters, its learning rate and its weight decay."""

    name: str
    names: tuple[str, ...]
    lr: float
    weight_decay: float


def freeze(policy: nn.Module, roles: Mapping[str, Role], preset: FreezePreset) -> None:
    """Freeze the parameters of an unwrapped policy that the preset selects. Parameters already frozen remain frozen.

    Raises:
        ConfigurationError: a trainable parameter has no role.
        UnsupportedError: the policy lacks the tower of the preset, or the preset would freeze all or none of its parameters.
    """
    if preset.requires_tower is None:
        return
    trainable = {name: parameter for name, parameter in live_parameters(policy) if parameter.requires_grad}
    towers = dict.fromkeys(_role(roles, name).tower for name in trainable)
    if preset.requires_tower not in towers:
        names = ", ".join(towers)
        raise UnsupportedError(
            f"freeze {preset.name} needs a tower {preset.requires_tower}, and {type(policy).__name__} trains {names}"
        )
    frozen = [parameter for name, parameter in trainable.items() if preset.freezes(roles[name])]
    if len(frozen) in (0, len(trainable)):
        scope = "nothing" if not frozen else "everything"
        raise UnsupportedError(f"freeze {preset.name} would freeze {scope} of {type(policy).__name__}")
    for parameter in frozen:
        parameter.requires_grad_(False)


def plan_groups(policy: nn.Module, roles: Mapping[str, Role], optim: OptimSpec) -> list[GroupPlan]:
    """Plan the groups of an unwrapped policy's trainable parameters, in a fixed order. Empty groups are omitted.

    Raises:
        ConfigurationError: a trainable parameter has no role.
    """
    names_by_group: dict[tuple[str, bool], list[str]] = {}
    for name, parameter in live_parameters(policy):
        if not parameter.requires_grad:
            continue
        role = _role(roles, name)
        names_by_group.setdefault((role.part, role.decay), []).append(name)
    plans = []
    for part, decay in (("backbone", True), ("backbone", False), ("head", True), ("head", False)):
        if names := names_by_group.get((part, decay)):
            lr = optim.lr if part == "backbone" or optim.head_lr is None else optim.head_lr
            label = f"{part}, {'decayed' if decay else 'not decayed'}"
            plans.append(GroupPlan(label, tuple(names), lr, optim.weight_decay if decay else 0.0))
    return plans


def _role(roles: Mapping[str, Role], name: str) -> Role:
    if name not in roles:
        raise ConfigurationError(Problem("", f"parameter {name} has no role", "add it to the policy's parameter_roles()"))
    return roles[name]


def bind_groups(plans: Iterable[GroupPlan], parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Build torch parameter groups from plans and the (possibly wrapped) parameters by their names before wrapping."""
    return [
        {
            "params": [parameters[name] for name in plan.names],
            "lr": plan.lr,
            "weight_decay": plan.weight_decay,
            "name": plan.name,
        }
        for plan in plans
    ]
