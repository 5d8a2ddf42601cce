"""Parameter roles, from the names and modules of an unwrapped policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from benchbox.registry.contracts import Role

if TYPE_CHECKING:
    from collections.abc import Callable


def roles(policy: nn.Module, *, head: Callable[[str], bool]) -> dict[str, Role]:
    """A role for each parameter. `head` tells by name; only the matrices of linear and convolution layers decay.

    So biases, norms, positions and embeddings do not; adaRMS modulations, which are linear layers, do.
    """
    return {
        (name := f"{owner}.{own}" if owner else own): Role(
            part="head" if head(name) else "backbone",
            decay=isinstance(module, nn.Linear | nn.Conv2d) and parameter.ndim > 1,
        )
        for owner, module in policy.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
    }
