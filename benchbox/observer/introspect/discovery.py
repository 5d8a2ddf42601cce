"""Discovery of a training script's own objects: its models, optimizer wrappers, schedules and Accelerator.

A script passes nothing to the observer. But all its objects are alive, and Python's garbage collector lists them without
running any code of the script.
"""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from .tensor_sources import attribute_sources, container_sources, module_source, parameters_of, read_sources
from .wrappers import optimizer_chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .tensor_sources import TensorSource

_DEEPSPEED_SCHEDULES = "deepspeed.runtime.lr_schedules"
_MAX_WRAPPERS = 4

# stepper: whatever else has a method `step`; average: what has none, and is called an average
Role = Literal["module", "schedule", "accelerator", "stepper", "average", "tensor"]
_AVERAGE = re.compile(r"EMA|Ema(?![a-z])|Average")


@dataclass
class TrainingObjects:
    """The objects of a training around the optimizers that step."""

    models: list[nn.Module] = field(default_factory=list)  # outermost modules
    schedules: list[Any] = field(default_factory=list)
    accelerator: Any = None
    owners: dict[int, nn.Module] = field(default_factory=dict)  # by parameter id: an outermost module that holds it
    wrappers: dict[int, list[Any]] = field(default_factory=dict)  # by id of each optimizer: the objects that may wrap it
    others: list[TensorSource] = field(default_factory=list)  # beside the models: they may average weights

    def chain(self, optimizer: Any) -> list[Any]:
        """Return the optimizer and the objects around it that can step, outermost first."""
        chain = [optimizer]
        for _ in range(_MAX_WRAPPERS):
            candidates = self.wrappers.get(id(chain[0]), ())
            wrapper = next((candidate for candidate in candidates if all(candidate is not link for link in chain)), None)
            if wrapper is None:
                break
            chain.insert(0, wrapper)
        # The wrappers' own attributes may lead through more wrappers than these attributes do.
        declared = [optimizer_chain(wrapper) for wrapper in chain]
        return max([chain, *(candidate for candidate in declared if candidate[-1] is optimizer)], key=len)

    def further_models(self, stepped: Iterable[Tensor]) -> list[nn.Module]:
        """Return the outermost modules, beside the models, that hold a stepped tensor."""
        model_ids = set(map(id, self.models))
        owners = {id(owner): owner for tensor in stepped if (owner := self.owners.get(id(tensor))) is not None}
        return [owner for owner_id, owner in owners.items() if owner_id not in model_ids]


def discover(
    optimizers: Sequence[Any], called_modules: Sequence[nn.Module], constructed: Iterable[Any] = ()
) -> TrainingObjects:
    """Search the objects of the process once.

    Args:
        optimizers: the optimizers that step tensors themselves.
        called_modules: modules whose forward ran. The models are the outermost modules that contain one of them, or that hold
            a stepped parameter.
        constructed: optimizers and schedules whose construction was seen. The garbage collector no longer lists them, nor the
            modules, after `gc.freeze()`.
    """
    objects = TrainingObjects()
    found: dict[Role, list[Any]] = {role: [] for role in get_args(Role)}
    roles = _Roles()
    everything = gc.get_objects()  # hundreds of thousands, which iterators written in C look through in a third of the time
    listed = compress(everything, map(roles.__getitem__, map(type, everything)))
    for candidate in {id(candidate): candidate for candidate in (*listed, *called_modules, *constructed)}.values():
        found[cast("Role", roles[type(candidate)])].append(candidate)
    modules, steppers, objects.schedules = found["module"], found["stepper"], found["schedule"]
    objects.accelerator = found["accelerator"][-1] if found["accelerator"] else None
    # SequentialLR and ChainedScheduler advance their parts and report the resulting rates themselves.
    parts = {id(part) for schedule in objects.schedules for part in getattr(schedule, "_schedulers", ())}
    objects.schedules = [schedule for schedule in objects.schedules if id(schedule) not in parts]
    stepped = {id(tensor) for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]}
    roots = _outermost_modules(modules)
    objects.models = _training_models(roots, [id(module) for module in called_modules], stepped)
    objects.owners = {id(parameter): root for root in roots for parameter in parameters_of(root)}
    objects.wrappers = _find_wrappers(steppers)
    trained = set(map(id, objects.models))
    objects.others = [module_source(root) for root in roots if id(root) not in trained]
    sources = [
        *attribute_sources([*steppers, *found["average"]], objects.models),
        *(container_sources(everything, objects.models) if _may_hold_averages(found["tensor"], objects.models) else ()),
    ]
    objects.others += [  # masters average nothing
        source for source, tensors in zip(sources, read_sources(sources), strict=True) if stepped.isdisjoint(map(id, tensors))
    ]
    return objects


def _may_hold_averages(tensors: Iterable[Tensor], models: Iterable[nn.Module]) -> bool:
    """Return whether there are as many tensors beside the models' parameters and gradients as an average of one has."""
    lists = [parameters_of(model) for model in models]
    gradients = (parameter.grad for parameters in lists for parameter in parameters if parameter.is_leaf)
    of_models = {id(tensor) for tensor in chain(*lists, gradients)}
    trained = (sum(parameter.requires_grad for parameter in parameters) for parameters in lists)
    return sum(id(tensor) not in of_models for tensor in tensors) >= min(filter(None, trained), default=1)


class _Roles(dict[type, "Role | None"]):
    """Roles of the instances of classes, each class looked at once."""

    def __missing__(self, kind: type) -> Role | None:
        self[kind] = role = _role_of(kind)
        return role


def _role_of(kind: type) -> Role | None:
    if issubclass(kind, nn.Module):
        return "module"
    if issubclass(kind, Tensor):
        return "tensor"
    if issubclass(kind, LRScheduler) or kind.__module__ == _DEEPSPEED_SCHEDULES:
        return "schedule"
    if kind.__name__ == "Accelerator" and kind.__module__.startswith("accelerate."):
        return "accelerator"
    if _has_step(kind):
        return "stepper"
    return "average" if _AVERAGE.search(kind.__name__) else None


def _outermost_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that no other module contains."""
    children = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    return [module for module in modules if id(module) not in children and "_modules" in module.__dict__]


def _training_models(roots: Sequence[nn.Module], called: Sequence[int], stepped: set[int]) -> list[nn.Module]:
    """Return the outermost modules that contain a called module or a stepped parameter, in the order in which they were called.

    The garbage collector lists objects by their age, more or less, and masters of several models are linked in order.
    """
    positions = {module_id: position for position, module_id in enumerate(called)}
    models: list[tuple[int, nn.Module]] = []
    for root in roots:
        parts = list(root.modules())
        position = min(positions.get(id(part), len(positions)) for part in parts)
        if position < len(positions) or any(_holds_any(part, stepped) for part in parts):
            models.append((position, root))
    return [root for _, root in sorted(models, key=lambda model: model[0])]


def _holds_any(module: nn.Module, stepped: set[int]) -> bool:
    return any(id(parameter) in stepped for parameter in module.__dict__.get("_parameters", {}).values())


def _has_step(kind: type) -> bool:
    """Return whether the instances of a class can step. Classes are not asked: their metaclasses may run any code."""
    return any(callable(vars(base).get("step")) for base in kind.__mro__)


def _find_wrappers(steppers: Sequence[Any]) -> dict[int, list[Any]]:
    """Return, by the id of each of these objects, those of them that have it in an attribute."""
    wrappers: dict[int, list[Any]] = {id(stepper): [] for stepper in steppers}
    for wrapper in steppers:
        for value_id in {id(value) for value in attribute_values(wrapper)} & wrappers.keys():
            wrappers[value_id].append(wrapper)
    return wrappers


def attribute_values(instance: Any) -> Iterator[Any]:
    """Yield the values of all attributes, and those in their lists and dicts, without running properties."""
    attributes = getattr(instance, "__dict__", {})
    for referent in gc.get_referents(instance):
        for value in attributes.values() if referent is attributes else (referent,):
            yield value
            if type(value) in (list, tuple):
                yield from value
            elif type(value) is dict:
                yield from list(value.values())  # another thread may change it meanwhile
