"""Places where a script may keep an average of its weights: modules, and lists and dicts of tensors."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..numerics.probes import can_probe
from .names import live_parameters, storage_address, unwrapped_name
from .tensors import has_shape, local_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence


NamedParameters = list[tuple[str, nn.Parameter]]

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


class TensorSource(NamedTuple):
    """A place of tensors, which `read_sources` reads anew: a script may replace them, and must not keep the old ones.

    `key` is the identity of the place. A module is a copy of the weights by its class and shapes; others may hold anything.
    Lists and dicts have no weak references: `read` is given the one at `address`, or None.
    """

    key: Hashable
    name: str
    read: Callable[[Any], list[Tensor]]
    is_module: bool = False
    address: int | None = None


def read_sources(sources: Sequence[TensorSource]) -> list[list[Tensor]]:
    """Return the tensors of each source. The objects of the process, a million perhaps, are looked through once for all."""
    addresses = {source.address for source in sources} - {None}
    containers: dict[int, Any] = {}
    if addresses:
        containers = {id(listed): listed for listed in gc.get_objects() if id(listed) in addresses}
    return [source.read(None if source.address is None else containers.get(source.address)) for source in sources]


def module_source(module: nn.Module) -> TensorSource:
    """Return the parameters of a module."""
    reference = weakref.ref(module)

    def read(_: Any) -> list[Tensor]:
        return [] if (alive := reference()) is None else parameters_of(alive)

    return TensorSource(id(module), type(module).__name__, read, is_module=True)


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module and its parts, each once, without running a `parameters` of the script."""
    parameters = [parameter for part in module.modules() for parameter in part.__dict__.get("_parameters", {}).values()]
    return list({id(p): p for p in parameters if p is not None and has_shape(p)}.values())


def parameter_lists(models: Iterable[nn.Module]) -> list[NamedParameters]:
    """Return what an average may follow: all parameters of a model, or those that are trained."""
    lists = [list(live_parameters(model)) for model in models]
    return lists + [[(name, parameter) for name, parameter in live if parameter.requires_grad] for live in lists]


def followed_parameters(tensors: Sequence[Tensor], lists: Iterable[NamedParameters]) -> NamedParameters:
    """Return the parameters that tensors may average, of the same shapes in order, or none: views of them average nothing."""
    for parameters in lists:
        if len(parameters) == len(tensors) > 0 and all(
            has_shape(tensor)
            and tensor.is_leaf
            and can_probe(tensor)
            and local_shard(tensor).shape == local_shard(parameter).shape
            for tensor, (_, parameter) in zip(tensors, parameters, strict=True)
        ):
            addresses = {storage_address(tensor) for tensor in tensors} - {0}
            is_view = any(storage_address(parameter) in addresses for _, parameter in parameters)
            return [] if is_view else parameters
    return []


def attribute_sources(owners: Iterable[Any], models: Iterable[nn.Module]) -> Iterator[TensorSource]:
    """Yield the lists and dicts of tensors that objects other than optimizers have. Of state dicts, buffers are left out."""
    names = _parameter_names(models)
    for owner in owners:
        # Classes are not asked for attributes: their metaclasses may run any code.
        if isinstance(owner, Optimizer) or not any("__weakref__" in vars(base) for base in type(owner).__mro__):
            continue
        for attribute, value in list(getattr(owner, "__dict__", {}).items()):
            if _tensors(value, names):
                read = functools.partial(_read_attribute, weakref.ref(owner), attribute, names)
                yield TensorSource((id(owner), attribute), f"{type(owner).__name__}.{attribute}", read)


def container_sources(objects: Sequence[Any], models: Sequence[nn.Module]) -> Iterator[TensorSource]:
    """Yield the lists and dicts among the objects of the process that may average the models' weights, whoever has them."""
    names, lists = _parameter_names(models), parameter_lists(models)
    fewest = min(map(len, lists), default=1)  # most containers of a process have fewer values
    containers = compress(objects, map(_CONTAINERS.__contains__, map(type, objects)))
    for candidate in [candidate for candidate in containers if len(candidate) >= fewest]:
        if followed_parameters(_tensors(candidate, names), lists):
            kind = "dict" if isinstance(candidate, dict) else "list"
            read = functools.partial(_tensors, names=names)
            yield TensorSource(id(candidate), f"a {kind} of tensors", read, address=id(candidate))


def _parameter_names(models: Iterable[nn.Module]) -> frozenset[str]:
    return frozenset(name for model in models for name, _ in live_parameters(model))


def _read_attribute(owner: weakref.ref[Any], attribute: str, names: frozenset[str], _: Any) -> list[Tensor]:
    return _tensors(getattr(owner(), "__dict__", {}).get(attribute), names)


def _tensors(container: Any, names: frozenset[str]) -> list[Tensor]:
    """Return the values of a container that are to be read, an empty list unless all its values are tensors."""
    if type(container) not in _CONTAINERS:
        return []
    items = container.values() if isinstance(container, dict) else container
    if not issubclass(type(next(iter(items), None)), Tensor) or not all(issubclass(type(item), Tensor) for item in list(items)):
        return []
    pairs = list(container.items()) if isinstance(container, dict) else []
    named = [value for key, value in pairs if isinstance(key, str) and unwrapped_name(key) in names]
    return named or list(items)
