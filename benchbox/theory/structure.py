"""Description of a policy for the formulas: its parameters, and the order of what a step does with them.

`benchbox.estimation` reads both from a policy and its step. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = ""  # the unit of the parameters that no sharded module has

UseKind = Literal["call", "return", "call_backward", "return_backward"]
EventKind = UseKind | Literal["allocate", "free", "enter", "leave", "enter_again", "enter_backward", "gradient", "forward_end"]
USES: frozenset[EventKind] = frozenset({"call", "return", "call_backward", "return_backward"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One parameter of a policy before it is wrapped, in the order of the policy."""

    name: str
    shape: tuple[int, ...]
    trains: bool
    group: int | None = None  # number of its parameter group, if it trains
    fsdp1_unit: str = ROOT  # name of the module it is sharded with
    fsdp2_unit: str = ROOT

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of forward and backward.

    `allocate` and `free` have bytes of activations. `gradient` has the number of a parameter whose gradient is complete: if
    that was an activation, its memory was freed just before. The others have the name of a module: a sharded module is entered
    and left in forward, entered again where backward repeats its forward, and entered in backward. What ZeRO-3 sees of any
    module, its uses, are its `call` and `return` in forward and the same in backward: when the gradient of something that it
    returned is complete, and when those of all its inputs are.
    """

    kind: EventKind
    size: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Events of forward and backward of one micro-batch, without sharding, in the order in which they happen.

    For ZeRO-3, `external` has the numbers of the parameters that a module reads from modules that are not called within it, and
    `earlier` the uses of modules in the micro-steps before this one, from the first of the training on; None if those are not
    known, and taken to be as in this one. `smallest_share` is that of a micro-batch without any optional part in the FLOPs.
    `has_size_of_step` is whether a rank of the step that is predicted has a micro-batch as large as this one.
    """

    events: tuple[Event, ...]
    model_flops: int = 0
    recomputed_flops: int = 0
    smallest_share: float | None = 1.0  # None: not known
    has_size_of_step: bool = True
    collectives: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of the policy itself: count, bytes
    logits_bytes: int = 0  # the largest result of a matrix product that forward keeps
    external: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    earlier: tuple[tuple[Event, ...], ...] | None = None

    @property
    def uses(self) -> tuple[Event, ...]:
        """The uses of modules. Only a trace for ZeRO-3 has them."""
        return tuple(event for event in self.events if event.kind in USES)

    @property
    def gradients(self) -> tuple[int, ...]:
        """The numbers of the parameters in the order in which their gradients are complete."""
        return tuple(event.size for event in self.events if event.kind == "gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A policy as the formulas see it. `layout` has the numbers of the parameters that each module has itself."""

    parameters: tuple[ParameterShape, ...]
    buffers: Mapping[str, int] = field(default_factory=dict)  # dtype: bytes
    batch_bytes: int = 0  # of one micro-batch
    layout: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the parameters that train."""
        return tuple(number for number, parameter in enumerate(self.parameters) if parameter.trains)

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trained_numel(self) -> int:
        return sum(self.parameters[number].numel for number in self.trained)

    @property
    def groups(self) -> dict[int, list[int]]:
        """Numbers of the parameters of each group, in order."""
        groups: dict[int, list[int]] = {}
        for number in self.trained:
            group = self.parameters[number].group
            assert group is not None, "what trains has a group"
            groups.setdefault(group, []).append(number)
        return dict(sorted(groups.items()))

    def units(self, kind: Literal["fsdp1_unit", "fsdp2_unit"]) -> dict[str, list[int]]:
        """Numbers of the parameters of each sharded module; those of no module are the root's, which is always there."""
        units: dict[str, list[int]] = {ROOT: []}
        for number, parameter in enumerate(self.parameters):
            units.setdefault(getattr(parameter, kind), []).append(number)
        return {name: numbers for name, numbers in units.items() if numbers}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSetup:
    """Description of a cell for the formulas: who shards, over how many ranks, and the bytes of an element of each kind.

    `live_size` is of the parameters that compute and of the gradients that are reduced, `stepped_size` of what the optimizer
    steps, `moment_size` of its two moments.
    """

    backend: str
    world_size: int
    shard_size: int = 2  # of a hybrid backend
    accumulation: int = 1
    live_size: int = 2
    stepped_size: int = 4
    moment_size: int = 4
    states: int = 2  # tensors of optimizer state as large as the parameter
    masters: bool = True
    spike_guard: bool = False
    averages: bool = False
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def is_hybrid(self) -> bool:
        return self.backend in ("hsdp", "fsdp1_hybrid", "fsdp1_hybrid_grad_op")

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.shard_size if self.is_hybrid else self.world_size


def entered_in_backward(timeline: Timeline) -> set[str]:
    """Return the sharded modules that backward enters: their results depend on something that trains."""
    return {event.name for event in timeline.events if event.kind == "enter_backward"}


def fsdp2_backward_gathers(timeline: Timeline, units: Iterable[str]) -> set[str]:
    """Return the units that FSDP2 gathers in backward: those that backward enters, and before each the one that it prefetches.

    The latter is the one that forward left just before, whether backward enters it or not (`_backward_prefetch`).
    """
    entered, names = entered_in_backward(timeline), set(units)
    left = [event.name for event in timeline.events if event.kind == "leave" and event.name in names]
    prefetched = {before for before, name in pairwise(left) if name in entered}
    return (entered & names) | prefetched
