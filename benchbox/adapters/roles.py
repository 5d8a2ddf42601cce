"""Parameter roles of a module that was not written for benchbox, by convention."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchbox.observer.introspect.names import live_parameters, unwrapped_modules
from benchbox.registry.contracts import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# Words of a name that say which tower a parameter belongs to. The first word of the name that is one of these decides.
_TOWERS = {
    **dict.fromkeys(("vision", "visual", "vit", "siglip", "dino", "image", "projector", "connector"), "vision"),
    "expert": "expert",
    **dict.fromkeys(("head", "heads"), "head"),
}
_HEADS = ("expert", "head")  # towers that are trained from scratch


def conventional_roles(module: nn.Module) -> Mapping[str, Role]:
    """Return a role for each parameter.

    Matrices decay; vectors, biases and the weights of norms do not. A name with the word `head` or `expert` is part of the
    head, all others of the backbone.
    """
    norms = {name for name, part in unwrapped_modules(module) if "norm" in type(part).__name__.lower()}
    roles = {}
    for name, parameter in live_parameters(module):
        tower = _tower(name)
        decay = parameter.ndim > 1 and name.rpartition(".")[0] not in norms
        roles[name] = Role(part="head" if tower in _HEADS else "backbone", decay=decay, tower=tower)
    return roles


def _tower(name: str) -> str:
    words = re.split(r"[._]", name.lower())
    return next((_TOWERS[word] for word in words if word in _TOWERS), "backbone")
