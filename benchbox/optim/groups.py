"""Frozen parameters, and parameter groups by name, part (backbone or head) and weight decay.

Both are decided from names and shapes before the policy is wrapped. After sharding, every parameter may be a 1-D shard, and a
rule such as "decay parameters with two dimensions" then silently decays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, Any

from benchbox.errors import ConfigurationError, Problem, UnsupportedError
from benchbox.observer.introspect.names import live_parameters
from benchbox.registry.contracts import Role
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from benchbox.registry.freezing import FreezePreset
    from benchbox.spec.optim import GroupSpec, OptimSpec

_PARTS = ("backbone", "head")


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Plan of a parameter group: the names of its parameters and their hyperparameters.

    All are of one part. `freeze_steps` is the number of steps before they train.
    """

    name: str
    names: tuple[str, ...]
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    part: str
    freeze_steps: int = 0


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

    Parameters that match a pattern of `optim.groups` come first, by pattern; part and decay separate them like all others.

    Raises:
        ConfigurationError: a trainable parameter has no role, a pattern matches none that an earlier one leaves, or
            `freeze_backbone_steps` would freeze all or none of the parameters.
    """
    names_by_group: dict[tuple[int, str, bool], list[str]] = {}
    unmatched = len(optim.groups)
    names = [name for name, parameter in live_parameters(policy) if parameter.requires_grad]
    for name in names:
        role = _role(roles, name)
        index = next((index for index, group in enumerate(optim.groups) if fnmatchcase(name, group.match)), unmatched)
        names_by_group.setdefault((index, role.part, bool(role.decay)), []).append(name)
    _check_patterns(optim.groups, names, {index for index, _, _ in names_by_group})
    plans = []
    for index in range(unmatched + 1):
        group = optim.groups[index] if index < unmatched else None
        for part, decay in product(_PARTS, (True, False)):
            if group_names := names_by_group.get((index, part, decay)):
                plans.append(_plan(group, part, decay, tuple(group_names), optim))
    frozen = [plan for plan in plans if plan.freeze_steps]
    if optim.freeze_backbone_steps and len(frozen) in (0, len(plans)):
        message = f"would freeze {'nothing' if not frozen else 'everything'} that trains of {type(policy).__name__}"
        raise ConfigurationError(Problem("optim.freeze_backbone_steps", message, "take it out"))
    return plans


def _plan(group: GroupSpec | None, part: str, decay: bool, names: tuple[str, ...], optim: OptimSpec) -> GroupPlan:
    is_head = part == "head"
    lr = optim.head_lr if is_head and optim.head_lr is not None else optim.lr
    weight_decay = optim.head_weight_decay if is_head and optim.head_weight_decay is not None else optim.weight_decay
    betas, label = optim.betas, f"{part}, {'decayed' if decay else 'not decayed'}"
    if group is not None:
        lr = lr if group.lr is None else group.lr
        weight_decay = weight_decay if group.weight_decay is None else group.weight_decay
        betas, label = group.betas or betas, f"{group.match}: {label}"
    freeze_steps = 0 if is_head else optim.freeze_backbone_steps
    return GroupPlan(label, names, lr, weight_decay if decay else 0.0, betas, part, freeze_steps)


def _check_patterns(groups: Sequence[GroupSpec], names: Sequence[str], matching: set[int]) -> None:
    """Raise ConfigurationError for the patterns that select no parameter, with the nearest names."""
    parts = [name.split(".") for name in names]
    prefixes = {".".join(part[:length]) + ".*" for part in parts for length in range(1, len(part))}
    problems = []
    for index, group in enumerate(groups):
        if index in matching:
            continue
        if any(fnmatchcase(name, group.match) for name in names):
            message, hint = "matches only parameters that earlier patterns match", "move it up"
        else:
            message, hint = "matches no trainable parameter", did_you_mean(group.match, prefixes | set(names))
        problems.append(Problem(f"optim.groups[{index}].match", f"{group.match!r} {message}", hint or None))
    if problems:
        raise ConfigurationError(problems)


def _role(roles: Mapping[str, Role], name: str) -> Role:
    if name not in roles:
        raise ConfigurationError(Problem("", f"parameter {name} has no role", "add it to the policy's parameter_roles()"))
    role = roles[name]
    if not isinstance(role, Role) or role.part not in _PARTS:  # it would be in no group, and not be trained
        raise ConfigurationError(Problem("", f"parameter {name} has the role {role!r}", f"its part is {' or '.join(_PARTS)}"))
    return role


def bind_groups(plans: Iterable[GroupPlan], parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Build torch parameter groups from plans and the (possibly wrapped) parameters by their names before wrapping."""
    return [
        {
            "params": [parameters[name] for name in plan.names],
            "lr": plan.lr,
            "weight_decay": plan.weight_decay,
            "betas": plan.betas,
            "name": plan.name,
        }
        for plan in plans
    ]
