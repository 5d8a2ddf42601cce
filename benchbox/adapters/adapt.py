"""`benchbox.adapt`: a policy from any `nn.Module`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from benchbox.adapters.casting import cast_buffers_to_inputs
from benchbox.adapters.policy import AdaptedPolicy
from benchbox.adapters.signatures import takes
from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from benchbox.adapters.units import UnitNames
    from benchbox.registry.contracts import Batch, BatchSpec, Role
    from benchbox.theory.flops import Product


def adapt(
    module: nn.Module,
    *,
    loss: Callable[..., Tensor],
    batch: Callable[..., Any],
    spec: BatchSpec | None = None,
    units: type[nn.Module] | str | UnitNames | None = None,
    roles: Callable[[str], Role] | None = None,
    cast_buffers: str | Collection[str] = (),
    attention: Callable[[nn.Module, str], None] | None = None,
    work: Callable[[Batch], list[Product]] | None = None,
    act: Callable[[nn.Module, Batch], Tensor] | None = None,
) -> AdaptedPolicy:
    """Return a policy that trains a module. What can be observed on the module is not asked for.

    Args:
        module: built in float32. Its names, and those of its state dict, stay as they are.
        loss: `loss(output)` or `loss(output, batch)`, a scalar or one value per sample (B,), from what the module returns.
        batch: with a `spec`, `batch(batch)`: the module's arguments from a batch of benchbox, whose `state` and `action` are
            normalised as the spec says. Without one, `batch(size, seed)`: generated arguments whose tensors have `size` as
            their first dimension. A tuple is positional arguments, a dictionary keyword arguments, else the only argument.
        spec: what the data must deliver. Without one the cells need `data: synthetic`.
        units: classes of the layers, or their names, or one, where those that `find_layer_units` finds are not right.
        roles: the role of a parameter by its name, instead of `conventional_roles`.
        cast_buffers: names of buffers that follow the dtype of the inputs of their part, where a part computes products of
            both. Other buffers keep their dtype.
        attention: `attention(module, kernel)` switches the attention kernel. Models of transformers switch by themselves.
        work: the formula of the FLOPs by tower. Without one, FLOPs are as torch counts them.
        act: `act(module, batch)`, normalised actions (B, N, A) from the current frame on; N is the spec's `acting_horizon`.
            Without one, the policy does not act.

    Raises:
        ConfigurationError: an argument is of the wrong form.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationError(Problem("adapt(module)", f"{module!r} is no nn.Module", "give it an instance"))
    optional = {"roles": roles, "attention": attention, "work": work, "act": act}
    functions = {"loss": loss, "batch": batch} | {name: value for name, value in optional.items() if value is not None}
    for name, function in functions.items():
        if not callable(function):
            raise ConfigurationError(Problem(f"adapt({name}=...)", f"{function!r} cannot be called", "give it a function"))
    if spec is None and not takes(batch, 2):
        hint = "give it spec=BatchSpec(...) to read benchbox's batch, or let it take (size, seed)"
        raise ConfigurationError(Problem("adapt(batch=...)", "without a spec it must take the batch size and a seed", hint))
    cast_buffers_to_inputs(module, [cast_buffers] if isinstance(cast_buffers, str) else cast_buffers)
    units = (units,) if isinstance(units, str | type) else units  # one is not its characters
    return AdaptedPolicy(
        module, loss=loss, batch=batch, spec=spec, units=units, roles=roles, attention=attention, act=act, work=work
    )
