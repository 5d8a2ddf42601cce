"""Structure of a policy for the formulas, read from its modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.backends.fsdp1 import sharded_modules
from benchbox.observer.introspect.names import live_parameters
from benchbox.theory.structure import ROOT, ParameterShape, Structure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from benchbox.optim import GroupPlan


def module_names(policy: nn.Module) -> dict[nn.Module, str]:
    """Return the name of every module."""
    return {module: name for name, module in policy.named_modules()}


def unit_modules(policy: Any, kind: str) -> dict[nn.Module, str]:
    """Return the name of each module that FSDP1 or FSDP2 shards, the root among them."""
    layers = policy.layer_units()
    if kind == "fsdp1":
        units = sharded_modules(policy, layers)
    else:
        units = {module for module in policy.modules() if isinstance(module, layers)}
    return {module: name for module, name in module_names(policy).items() if module in units} | {policy: ROOT}


def own_parameters(policy: nn.Module) -> dict[nn.Module, tuple[int, ...]]:
    """Return the numbers of the parameters that each module has itself, not in a module within it."""
    numbers = {parameter: number for number, parameter in enumerate(policy.parameters())}
    return {module: tuple(numbers[parameter] for parameter in module.parameters(recurse=False)) for module in policy.modules()}


def read_structure(policy: nn.Module, plans: Sequence[GroupPlan], batch_bytes: int) -> Structure:
    """Return the structure of an unwrapped, frozen policy."""
    groups = {name: group for group, plan in enumerate(plans) for name in plan.names}
    fsdp1, fsdp2 = (dict(_innermost_units(policy, unit_modules(policy, kind))) for kind in ("fsdp1", "fsdp2"))
    names = module_names(policy)
    buffers: dict[str, int] = {}
    for buffer in policy.buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        buffers[dtype] = buffers.get(dtype, 0) + buffer.nbytes
    return Structure(
        parameters=tuple(
            ParameterShape(
                name=name,
                shape=tuple(parameter.shape),
                trains=parameter.requires_grad,
                group=groups.get(name),
                fsdp1_unit=fsdp1[parameter],
                fsdp2_unit=fsdp2[parameter],
            )
            for name, parameter in live_parameters(policy)  # by the names of the groups
        ),
        buffers=buffers,
        batch_bytes=batch_bytes,
        layout={names[module]: numbers for module, numbers in own_parameters(policy).items()},
    )


def _innermost_units(policy: nn.Module, units: Mapping[nn.Module, str]) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield every parameter with the name of the sharded module that is nearest above it."""

    def visit(module: nn.Module, unit: str) -> Iterator[tuple[nn.Parameter, str]]:
        unit = units.get(module, unit)
        for parameter in module.parameters(recurse=False):
            yield parameter, unit
        for child in module.children():
            yield from visit(child, unit)

    # A parameter that several modules share belongs to the first that has it.
    seen: set[nn.Parameter] = set()
    for parameter, unit in visit(policy, ROOT):
        if parameter not in seen:
            seen.add(parameter)
            yield parameter, unit
