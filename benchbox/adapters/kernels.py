"""The attention kernel of a module that was not written for benchbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# Names that transformers gives to benchbox's kernels.
_IN_TRANSFORMERS = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention"}


def set_attention(module: nn.Module, kernel: str, switch: Callable[[nn.Module, str], None] | None) -> None:
    """Switch a module to an attention kernel; `native` leaves it as it is.

    Args:
        switch: the user's function, else `set_attn_implementation` of the models of transformers in the module.

    Raises:
        UnsupportedError: the module cannot switch, or its model lacks this kernel.
    """
    if kernel == "native":
        return
    if switch is not None:
        switch(module, kernel)
        return
    models: list[Any] = _transformers_models(module)
    if not models:
        raise UnsupportedError(f"{type(module).__name__} cannot switch its attention kernel: write attention: native")
    for model in models:
        try:
            model.set_attn_implementation(_IN_TRANSFORMERS[kernel])
        except ValueError as error:
            raise UnsupportedError(f"{type(model).__name__} has no {kernel} attention: {error}") from None


def _transformers_models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models of transformers in a module: each switches the models that it contains."""
    models: list[nn.Module] = []
    covered: set[nn.Module] = set()
    for part in module.modules():  # parents first
        if hasattr(part, "set_attn_implementation") and part not in covered:
            models.append(part)
            covered.update(part.modules())
    return models
