"""Finding the training script's own objects: its model, the wrappers of its optimizer, its schedules, its Accelerator.

A script hands nothing over. But everything it holds is alive, and Python's garbage collector can list it without calling any of
its code.
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
_NESTING = 4  # wrappers around wrappers


@dataclass
class Surroundings:
    """What was found around the optimizers that step."""

    models: list[nn.Module] = field(default_factory=list)  # outermost modules
    chains: list[list[Any]] = field(default_factory=list)  # one for each optimizer that steps: outermost wrapper first
    schedules: list[Any] = field(default_factory=list)
    accelerator: Any = None
    scaler: Any = None


def look_around(optimizers: Sequence[Any], called: Iterable[nn.Module]) -> Surroundings:
    """Search the process once.

    Args:
        optimizers: those that step tensors themselves.
        called: modules that were called; the models are the outermost modules that contain one of them, or hold a parameter
            that is stepped.
    """
    found = Surroundings()
    modules: list[nn.Module] = []
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, nn.Module):
            modules.append(thing)
        elif issubclass(kind, LRScheduler) or kind.__module__ == _DEEPSPEED_SCHEDULES:
            found.schedules.append(thing)
        elif kind.__name__ == "Accelerator" and kind.__module__.startswith("accelerate."):
            found.accelerator = thing
    # SequentialLR and ChainedScheduler advance these, and say what comes of them.
    parts = {id(part) for schedule in found.schedules for part in getattr(schedule, "_schedulers", ())}
    found.schedules = [schedule for schedule in found.schedules if id(schedule) not in parts]
    stepped = {id(tensor) for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]}
    found.models = _outermost(modules, {id(module) for module in called}, stepped)
    found.chains = [_wrapped(optimizer) for optimizer in optimizers]
    return found


def _outermost(modules: Sequence[nn.Module], called: set[int], stepped: set[int]) -> list[nn.Module]:
    """Modules that no other contains, of those that contain a called one or a stepped parameter. A deleted child is None."""
    children = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    roots = [module for module in modules if id(module) not in children and "_modules" in module.__dict__]
    return [root for root in roots if any(id(part) in called or _holds(part, stepped) for part in root.modules())]


def _holds(module: nn.Module, stepped: set[int]) -> bool:
    return any(id(parameter) in stepped for parameter in module.__dict__.get("_parameters", {}).values())


def _wrapped(optimizer: Any) -> list[Any]:
    """The optimizer and what holds it and can step, outermost first."""
    chain = [optimizer]
    for _ in range(_NESTING):
        holder = _holder(chain[0], chain)
        if holder is None:
            break
        chain.insert(0, holder)
    # What wrappers themselves say they wrap may go through more of them than what refers to what.
    declared = [optimizer_chain(outer) for outer in chain]
    return max([chain, *(each for each in declared if each[-1] is optimizer)], key=len)


def _holder(inner: Any, known: Sequence[Any]) -> Any:
    for referrer in gc.get_referrers(inner):
        # An instance refers to what it holds itself, or through its __dict__.
        owners = gc.get_referrers(referrer) if type(referrer) is dict else [referrer]
        for owner in owners:
            if (
                not _is_plain(owner)
                and callable(getattr(type(owner), "step", None))
                and all(owner is not each for each in known)
            ):
                if type(referrer) is dict and referrer is not getattr(owner, "__dict__", None):
                    continue
                if not issubclass(type(owner), (LRScheduler, nn.Module)) and type(owner).__module__ != _DEEPSPEED_SCHEDULES:
                    return owner
    return None


def _is_plain(thing: Any) -> bool:
    return isinstance(thing, (dict, list, tuple, set, types.FrameType, types.ModuleType, types.FunctionType, type))
