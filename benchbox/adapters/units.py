"""Layer units of a module that was not written for benchbox: the classes at which it is sharded and checkpointed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UnitNames = tuple[type[nn.Module] | str, ...]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_layer_units(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of a module's layers, the largest first; none if nothing repeats.

    A layer is a class that transformers names in `_no_split_modules`, or one that occurs several times in one list of modules.
    Among classes that contain one another, the outer one is the layer. Classes without children, such as Linear, are none.
    """
    layers: dict[type[nn.Module], None] = {}
    covered: set[nn.Module] = set()
    named = _classes_never_split(module)
    candidates = [*sorted(named, key=lambda unit: -_numel(module, unit)), *_repeated_classes(module)]
    for candidate in candidates:
        instances = [layer for layer in module.modules() if type(layer) is candidate]
        if not any(layer in covered or any(child in covered for child in layer.modules()) for layer in instances):
            layers[candidate] = None
            covered.update(child for layer in instances for child in layer.modules())
    return tuple(layers)


def resolve_layer_units(module: nn.Module, units: UnitNames) -> tuple[type[nn.Module], ...]:
    """Return the classes that a user named, by the class or its name.

    Raises:
        ConfigurationError: the module has no part of such a class.
    """
    classes = dict.fromkeys(type(part) for part in module.modules())
    resolved = []
    for unit in units:
        matches = [cls for cls in classes if unit in (cls, cls.__name__)]
        if not matches:
            name = unit if isinstance(unit, str) else unit.__name__
            class_names = ", ".join(sorted({cls.__name__ for cls in classes}))
            raise ConfigurationError(
                Problem("adapt(units=...)", f"{type(module).__name__} has no part of class {name}", class_names)
            )
        resolved += matches
    return tuple(dict.fromkeys(resolved))


def outermost_layers(module: nn.Module, units: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Return the modules of these classes that are not inside another one of them."""
    layers: list[nn.Module] = []
    covered: set[nn.Module] = set()
    for part in module.modules():  # parents first
        if isinstance(part, units) and part not in covered:
            layers.append(part)
            covered.update(part.modules())
    return layers


def _classes_never_split(module: nn.Module) -> list[type[nn.Module]]:
    """Return the classes in `_no_split_modules` of transformers that are items of lists: others are not layers."""
    names: set[str] = set()
    for part in module.modules():
        never_split = getattr(part, "_no_split_modules", None)
        names.update(never_split if isinstance(never_split, list | tuple | set) else ())
    items = (child for container in _containers(module) for child in container.children())
    return list(dict.fromkeys(type(child) for child in items if type(child).__name__ in names))


def _repeated_classes(module: nn.Module) -> Sequence[type[nn.Module]]:
    """Return the classes that occur several times in one list and have children, those with most parameters first."""
    repeated: dict[type[nn.Module], None] = {}
    for container in _containers(module):
        counts = Counter(type(child) for child in container.children() if any(True for _ in child.parameters()))
        composed = {type(child) for child in container.children() if any(True for _ in child.children())}
        repeated |= {cls: None for cls, count in counts.items() if count > 1 and cls in composed and cls not in _CONTAINERS}
    return sorted(repeated, key=lambda cls: -_numel(module, cls))


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if isinstance(part, _CONTAINERS))


def _numel(module: nn.Module, cls: type[nn.Module]) -> int:
    parts = [part for part in module.modules() if type(part) is cls]
    return sum({id(p): p.numel() for part in parts for p in part.parameters()}.values())
