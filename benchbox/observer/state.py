"""What an observer notes while it watches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .hooks.calls import Calls
from .hooks.forward import ForwardWatch
from .hooks.operations import OperationWatch
from .introspect.names import compensation, storage_of
from .introspect.tensors import dtype_name, local_shard
from .numerics.census import Sizes
from .numerics.expected_update import sample
from .numerics.probes import MOST_ELEMENTS, can_look_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from .facts import Contract
    from .hooks.steps import Stepped
    from .introspect.discovery import Surroundings
    from .introspect.names import MasterLink
    from .numerics.probes import Look


@dataclass
class StepNotes:
    """Of one step, while it goes."""

    step: int
    close: bool
    micro_batches: int | None = None
    called: list[nn.Module] = field(default_factory=list)
    norm: tuple[Any, float] | None = None
    clipped: frozenset[int] = frozenset()  # ids of the parameters that clipping was handed
    rates: dict[int, tuple[str, list[float]]] = field(default_factory=dict)  # by optimizer: its class, and each rate once
    schedule_rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    schedule_steps: dict[str, int] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)  # ids of tensors
    stepped_norm: float | None = None

    def note_rates(self, optimizer: Optimizer, tensors: Stepped) -> None:
        """The learning rates in force."""
        _, rates = self.rates.setdefault(id(optimizer), (type(optimizer).__name__, []))
        for group, _, tensor in tensors:
            self.stepped.add(id(tensor))
            if isinstance(rate := group.get("lr"), (int, float, Tensor)) and float(rate) not in rates:
                rates.append(float(rate))

    def named_rates(self) -> dict[str, tuple[float, ...]]:
        """By class of the optimizer; several of one class are told apart only where their rates differ."""
        distinct = dict.fromkeys((kind, tuple(rates)) for kind, rates in self.rates.values())
        names = numbered(kind for kind, _ in distinct)
        return {name: rates for name, (_, rates) in zip(names, distinct, strict=True)}

    def note_schedules(self, schedules: Sequence[Any]) -> None:
        """As they are when the step begins: those that are found in the middle of it add to the others."""
        for name, schedule in named(schedules):
            if name in self.schedule_rates or name in self.schedule_steps:
                continue
            rates = getattr(schedule, "_last_lr", None)
            if rates is not None:
                self.schedule_rates[name] = tuple(dict.fromkeys(float(rate) for rate in rates))
            count = getattr(schedule, "_step_count", getattr(schedule, "last_batch_iteration", None))
            if count is not None:
                self.schedule_steps[name] = int(count)


@dataclass
class Held:
    """What is known of a tensor that was stepped, as of its last close look."""

    tensor: Tensor
    options: dict[str, Any]
    place: int
    state: dict[str, Any]
    compensation: str | None
    gradient: str | None


class Stepping:
    """An optimizer that steps tensors itself, the wrappers around it (outermost first), and what it stepped."""

    def __init__(self, optimizer: Optimizer, chain: Sequence[Any]) -> None:
        self.optimizer = optimizer
        self.chain = list(chain)
        self.held: dict[int, Held] = {}

    def note(self, tensor: Tensor, group: Mapping[str, Any], place: int, state: Mapping[str, Any]) -> None:
        options = {name: value for name, value in group.items() if name != "params"}
        gradient = None if tensor.grad is None else dtype_name(local_shard(tensor.grad))
        self.held[id(tensor)] = Held(tensor, options, place, dict(state), compensation(self.optimizer, state), gradient)

    def groups(self) -> list[tuple[float, int]]:
        """(weight decay, tensors) of the parameter groups as the script made them: of the outermost optimizer that has any."""
        for optimizer in self.chain:
            if groups := getattr(optimizer, "param_groups", None):
                found = [(float(group.get("weight_decay", 0.0)), len(group["params"])) for group in groups]
                if any(tensors for _, tensors in found):
                    return found
        # ZeRO-3 fills its groups only while it steps
        decays = [float(held.options.get("weight_decay", 0.0)) for held in self.held.values()]
        return [(decay, decays.count(decay)) for decay in dict.fromkeys(decays)]


class Bystanders:
    """Trainable parameters that nobody was seen to step, and whether they move all the same: averages of other models do, and
    parameters whose masters nobody can find.
    """

    def __init__(self) -> None:
        self.moved: set[int] = set()
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # the parameter, and elements of it as first seen

    def look(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) in self.moved or not can_look_at(parameter):
                continue
            now = sample(local_shard(parameter), MOST_ELEMENTS)
            _, before = self._seen.setdefault(id(parameter), (parameter, now))
            if not torch.equal(before, now):
                self.moved.add(id(parameter))


@dataclass
class Notebook:
    """Everything noted so far. It refers to the training's own objects: it is thrown away once the facts are written.

    Args:
        source: session or command, as the facts will say.
        contract: what was declared.
        outermost: the optimizer that was handed over, if one was.
    """

    source: str
    contract: Contract | None
    outermost: Any
    around: Surroundings
    calls: Calls = field(default_factory=Calls)
    sizes: Sizes = field(default_factory=Sizes)
    forward: ForwardWatch = field(default_factory=ForwardWatch)
    operations: OperationWatch = field(default_factory=OperationWatch)
    steps: list[StepNotes] = field(default_factory=list)
    stepping: dict[int, Stepping] = field(default_factory=dict)  # by optimizer: those that step tensors themselves
    looks: dict[int, Look] = field(default_factory=dict)  # by stepped tensor
    links: dict[int, MasterLink] = field(default_factory=dict)  # by stepped tensor
    bystanders: Bystanders = field(default_factory=Bystanders)
    live: dict[int, str] = field(default_factory=dict)  # names of the models' parameters
    live_storages: set[int] = field(default_factory=set)

    def handed(self) -> set[int]:
        """Ids of all that optimizers step or hold, and of the parameters that this stands for."""
        found = {id(tensor) for each in self.stepping.values() for tensor in tensors_of(each.optimizer)}
        found |= {place for each in self.stepping.values() for place in each.held}
        return found | {place for link in self.links.values() for _, place in link.covers}

    def is_live(self, tensor: Tensor) -> bool:
        """Whether a model computes with this very tensor."""
        return id(tensor) in self.live or storage_of(tensor) in self.live_storages


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Everything in an optimizer's groups."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def named(schedules: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """By class, numbered where there are several of one."""
    return zip(numbered(type(schedule).__name__ for schedule in schedules), schedules, strict=True)


def numbered(kinds: Iterable[str]) -> Iterator[str]:
    """Names that differ: the second of a kind is called `kind 2`."""
    seen: dict[str, int] = {}
    for kind in kinds:
        seen[kind] = seen.get(kind, 0) + 1
        yield kind if seen[kind] == 1 else f"{kind} {seen[kind]}"
