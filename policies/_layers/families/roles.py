"""Parameter roles, from the names and modules of an unwrapped policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from benchbox.registry.contracts import Role

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS = ("expert", "head")  # towers trained from scratch; the others are pretrained


def assign_roles(policy: nn.Module, tower_of: Callable[[str], str]) -> dict[str, Role]:
    """Return a role for each parameter.

    Only the matrices of linear and convolution layers get weight decay. Biases, norms, position tables and embeddings do not;
    adaRMS modulations, which are linear layers, do.

    Args:
        policy: not wrapped.
        tower_of: returns the tower of a parameter name.
    """
    roles = {}
    for prefix, module in policy.named_modules():
        for suffix, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{suffix}" if prefix else suffix
            tower = tower_of(name)
            decay = isinstance(module, nn.Linear | nn.Conv2d) and parameter.ndim > 1
            roles[name] = Role(part="head" if tower in HEADS else "backbone", decay=decay, tower=tower)
    return roles


def vision_language_tower(name: str) -> str:
    """Return the tower of a parameter of a policy whose `model` is a vision-language model; outside it is the head."""
    if not name.startswith("model."):
        return "head"
    if name.startswith(("model.vision.", "model.projector.")):
        return "vision"
    return "expert" if ".expert" in name or name.startswith("model.expert_norm.") else "backbone"
