"""Discovery of a training script's own objects: its models, optimizer wrappers, schedules and Accelerator.

A script passes nothing to the observer. But all its objects are alive, and Python's garbage collector lists them without
running any code of the script.
"""

from __future__ import annotations

import gc
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .wrappers import optimizer_chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DEEPSPEED_SCHEDULES = "deepspeed.runtime.lr_schedules"
_MAX_WRAPPERS = 4


@dataclass
class TrainingObjects:
    """The objects of a training around the optimizers that step."""

    models: list[nn.Module] = field(default_factory=list)  # outermost modules
    chains: list[list[Any]] = field(default_factory=list)  # one per optimizer that steps, outermost wrapper first
    schedules: list[Any] = field(default_factory=list)
    accelerator: Any = None


def discover(optimizers: Sequence[Any], called_modules: Iterable[nn.Module]) -> TrainingObjects:
    """Search the objects of the process once.

    Args:
        optimizers: the optimizers that step tensors themselves.
        called_modules: modules whose forward ran. The models are the outermost modules that contain one of them, or that hold
            a stepped parameter.
    """
    objects = TrainingObjects()
    modules: list[nn.Module] = []
    for candidate in gc.get_objects():
        kind = type(candidate)
        if issubclass(kind, nn.Module):
            modules.append(candidate)
        elif issubclass(kind, LRScheduler) or kind.__module__ == _DEEPSPEED_SCHEDULES:
            objects.schedules.append(candidate)
        elif kind.__name__ == "Accelerator" and kind.__module__.startswith("accelerate."):
            objects.accelerator = candidate
    # SequentialLR and ChainedScheduler advance their parts and report the resulting rates themselves.
    parts = {id(part) for schedule in objects.schedules for part in getattr(schedule, "_schedulers", ())}
    objects.schedules = [schedule for schedule in objects.schedules if id(schedule) not in parts]
    stepped = {id(tensor) for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]}
    objects.models = _outermost_modules(modules, {id(module) for module in called_modules}, stepped)
    objects.chains = [_wrapper_chain(optimizer) for optimizer in optimizers]
    return objects


def _outermost_modules(modules: Sequence[nn.Module], called: set[int], stepped: set[int]) -> list[nn.Module]:
    """Return the modules that no other module contains and that contain a called module or a stepped parameter."""
    children = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    roots = [module for module in modules if id(module) not in children and "_modules" in module.__dict__]
    return [root for root in roots if any(id(part) in called or _holds_any(part, stepped) for part in root.modules())]


def _holds_any(module: nn.Module, stepped: set[int]) -> bool:
    return any(id(parameter) in stepped for parameter in module.__dict__.get("_parameters", {}).values())


def _wrapper_chain(optimizer: Any) -> list[Any]:
    """Return the optimizer and the objects around it that can step, outermost first."""
    chain = [optimizer]
    for _ in range(_MAX_WRAPPERS):
        wrapper = _find_wrapper(chain[0], chain)
        if wrapper is None:
            break
        chain.insert(0, wrapper)
    # The wrappers' own attributes may lead through more wrappers than the referrers do.
    declared = [optimizer_chain(wrapper) for wrapper in chain]
    return max([chain, *(candidate for candidate in declared if candidate[-1] is optimizer)], key=len)


def _find_wrapper(inner: Any, chain: Sequence[Any]) -> Any:
    for referrer in gc.get_referrers(inner):
        # An instance refers to its attributes directly or through its __dict__.
        owners = gc.get_referrers(referrer) if type(referrer) is dict else [referrer]
        for owner in owners:
            if (
                not _is_plain(owner)
                and callable(getattr(type(owner), "step", None))
                and all(owner is not wrapper for wrapper in chain)
            ):
                if type(referrer) is dict and referrer is not getattr(owner, "__dict__", None):
                    continue
                if not issubclass(type(owner), (LRScheduler, nn.Module)) and type(owner).__module__ != _DEEPSPEED_SCHEDULES:
                    return owner
    return None


def _is_plain(candidate: Any) -> bool:
    return isinstance(candidate, (dict, list, tuple, set, types.FrameType, types.ModuleType, types.FunctionType, type))
