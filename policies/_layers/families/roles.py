"""Parameter roles, from the names and modules of an unwrapped policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from benchbox.registry.contracts import Role

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS = ("expert", "head")  # towers that a policy trains from nothing; the others come pretrained


def roles(policy: nn.Module, tower: Callable[[str], str]) -> dict[str, Role]:
    """A role for each parameter. `tower` tells by name; only the matrices of linear and convolution layers decay.

    So biases, norms, positions and embeddings do not; adaRMS modulations, which are linear layers, do.
    """
    return {
        (name := f"{owner}.{own}" if owner else own): Role(
            part="head" if (where := tower(name)) in HEADS else "backbone",
            decay=isinstance(module, nn.Linear | nn.Conv2d) and parameter.ndim > 1,
            tower=where,
        )
        for owner, module in policy.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
    }


def vision_language_tower(name: str) -> str:
    """The tower of a parameter of a policy whose `model` is a vision-language model: what is not in it is head."""
    if not name.startswith("model."):
        return "head"
    if name.startswith(("model.vision.", "model.projector.")):
        return "vision"
    return "expert" if ".expert" in name or name.startswith("model.expert_norm.") else "backbone"
