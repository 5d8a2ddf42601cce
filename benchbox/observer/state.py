"""State of an observer while it watches a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .hooks.calls import PatchedCalls
from .hooks.forward import ForwardHooks
from .hooks.guard import FailureGuard
from .hooks.locations import LocationRecorder
from .hooks.operations import OperationRecorder
from .introspect.averages import AverageWatch
from .introspect.discovery import TrainingObjects
from .introspect.masters import detect_compensation
from .introspect.names import storage_address
from .introspect.tensors import dtype_name, local_shard
from .introspect.wrappers import parameter_groups
from .numerics.census import TensorCensus
from .numerics.expected_update import float_or_none, sample
from .numerics.probes import MAX_ELEMENTS, can_probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from .facts import Contract
    from .hooks.clips import Clip
    from .hooks.steps import SteppedTensors
    from .introspect.masters import MasterLink
    from .numerics.probes import TensorProbe


@dataclass(frozen=True)
class StepNorm:
    """A clipping, if there was any, and the norm of the gradients that the optimizer then read; None if that is unknown."""

    clip: Clip | None
    stepped: float | None

    @property
    def excess(self) -> tuple[bool, float]:
        """Sort key: how far the norm exceeds the limit of the clipping. A clipping of scaled gradients comes last."""
        if self.clip is None:
            return False, 0.0
        return self.clip.scale is not None, (self.stepped or 0.0) / (self.clip.max_norm or 1.0)


@dataclass
class StepObservation:
    """Observations of one optimizer step, the running one included."""

    step: int
    is_probed: bool
    micro_batches: int | None = None
    ends_epoch: bool = False
    called_modules: list[nn.Module] = field(default_factory=list)
    reported: tuple[Any, float] | None = None  # the norm and max_norm of a caller who clips by other means than torch's
    clips: dict[Clip, set[int]] = field(default_factory=dict)  # with the ids of the stepped tensors that they clipped
    # By id of the stepped tensor: why the gradient that was looked at is not the one the update was computed from.
    changed_gradients: dict[int, str] = field(default_factory=dict)
    rates: dict[int, tuple[str, list[float]]] = field(default_factory=dict)  # by optimizer id: its class, and distinct rates
    schedule_rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    schedule_steps: dict[str, int] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)  # ids of tensors
    probed: set[int] = field(default_factory=set)  # ids of those that are probed: in a probed step all of them
    linked: set[int] = field(default_factory=set)  # ids of the stepped tensors whose live parameters were looked for
    norm: StepNorm | None = None

    def record_rates(self, optimizer: Optimizer, tensors: SteppedTensors) -> None:
        """Record the learning rates of the tensors that are about to be stepped."""
        _, rates = self.rates.setdefault(id(optimizer), (type(optimizer).__name__, []))
        latest_group = None
        for group, _, tensor in tensors:
            self.stepped.add(id(tensor))
            if group is latest_group:
                continue
            latest_group = group
            if (rate := float_or_none(group.get("lr"))) is not None and rate not in rates:
                rates.append(rate)

    def release(self) -> None:
        """Drop the training's modules and tensors, once the facts are built."""
        self.called_modules.clear()
        self.clips.clear()
        self.reported = self.norm = None

    def clips_of(self, tensor_ids: Iterable[int]) -> list[Clip]:
        """Return the clippings of these stepped tensors."""
        stepped = set(tensor_ids)
        return [clip for clip, clipped in self.clips.items() if clipped & stepped]

    def rates_by_name(self) -> dict[str, tuple[float, ...]]:
        """Return the rates by optimizer class; optimizers of one class are numbered only if their rates differ."""
        distinct = dict.fromkeys((kind, tuple(rates)) for kind, rates in self.rates.values())
        names = unique_names(kind for kind, _ in distinct)
        return {name: rates for name, (_, rates) in zip(names, distinct, strict=True)}

    def record_schedules(self, schedules: Sequence[Any], skipped: int) -> None:
        """Record rates and step counts of schedules at the beginning of the step, unless they were recorded before.

        Args:
            skipped: steps before this one in which schedules advanced and no optimizer stepped, on purpose. Counts are without.
        """
        for name, schedule in named_schedules(schedules):
            if name in self.schedule_rates or name in self.schedule_steps:
                continue
            rates = getattr(schedule, "_last_lr", None)
            if rates is not None:
                self.schedule_rates[name] = tuple(dict.fromkeys(float(rate) for rate in rates))
            count = getattr(schedule, "_step_count", getattr(schedule, "last_batch_iteration", None))
            if count is not None:
                self.schedule_steps[name] = int(count) - skipped


@dataclass
class TensorSnapshot:
    """A stepped tensor as of the last step in which it was probed."""

    tensor: Tensor
    options: dict[str, Any]  # of its parameter group
    index: int  # among the optimizer's tensors
    optimizer_state: dict[str, Any]
    compensation: str | None
    gradient_dtype: str | None


class ObservedOptimizer:
    """An optimizer that steps tensors itself, its wrappers (outermost first), and snapshots of the tensors it stepped.

    `first_step` and `probed_step` are the first and the latest step in which its tensors were probed.
    """

    def __init__(self, optimizer: Optimizer, chain: Sequence[Any], first_step: int) -> None:
        self.optimizer = optimizer
        self.chain = list(chain)
        self.first_step, self.probed_step = first_step, 0
        self.snapshots: dict[int, TensorSnapshot] = {}  # by tensor id

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    def record(self, tensor: Tensor, group: Mapping[str, Any], index: int, optimizer_state: Mapping[str, Any]) -> None:
        """Take a snapshot of a tensor that was stepped."""
        options = {name: value for name, value in group.items() if name != "params"}
        gradient_dtype = None if tensor.grad is None else dtype_name(local_shard(tensor.grad))
        compensation = detect_compensation(self.optimizer, optimizer_state)
        self.snapshots[id(tensor)] = TensorSnapshot(tensor, options, index, dict(optimizer_state), compensation, gradient_dtype)

    def decay_groups(self) -> list[tuple[float, int]]:
        """Return (weight decay, tensors) of the script's parameter groups: those of the outermost optimizer that has any."""
        for optimizer in self.chain:
            sizes = [(_weight_decay(group), len(group["params"])) for group in parameter_groups(optimizer)]
            if any(tensors for _, tensors in sizes):
                return sizes
        # ZeRO-3 fills its groups only during a step
        decays = [_weight_decay(snapshot.options) for snapshot in self.snapshots.values()]
        return [(decay, decays.count(decay)) for decay in dict.fromkeys(decays)]


def _weight_decay(options: Mapping[str, Any]) -> float:
    return float_or_none(options.get("weight_decay")) or 0.0


class _Unstepped(NamedTuple):
    parameter: Tensor
    values: Tensor  # a sample of those at the first step
    first_step: int


class UnsteppedParameters:
    """Trainable parameters that no observed optimizer steps, and which of them change all the same.

    Averages of other models change, and so do parameters whose masters cannot be found.
    """

    def __init__(self) -> None:
        self.moved: set[int] = set()  # ids of parameters
        self._initial: dict[int, _Unstepped] = {}
        self._unmoved_steps: dict[int, int] = {}

    def record(self, parameters: Iterable[Tensor], step: int) -> None:
        """Compare parameters with their first recorded values, before a step."""
        for parameter in parameters:
            if id(parameter) in self.moved or not can_probe(parameter):
                continue
            values = sample(local_shard(parameter), MAX_ELEMENTS)
            initial = self._initial.setdefault(id(parameter), _Unstepped(parameter, values, step))
            if not torch.equal(initial.values, values):
                self.moved.add(id(parameter))
            elif parameter.grad is not None and bool(sample(local_shard(parameter.grad), MAX_ELEMENTS).any()):
                self._unmoved_steps[id(parameter)] = step - initial.first_step

    def unmoved_steps(self, parameter: Tensor) -> int:
        """Return the number of steps that left a parameter bit for bit unchanged until one for which it had a gradient."""
        return 0 if id(parameter) in self.moved else self._unmoved_steps.get(id(parameter), 0)


@dataclass
class ObserverState:
    """All observations so far. It refers to the training's objects and is therefore dropped once the facts are built.

    Args:
        source: session or command, for the facts.
        contract: the declared dtypes.
        outermost_optimizer: the optimizer that was passed to the observer, if any.
    """

    source: str
    contract: Contract | None = None
    outermost_optimizer: Any = None
    objects: TrainingObjects = field(default_factory=TrainingObjects)
    guard: FailureGuard = field(default_factory=FailureGuard)
    calls: PatchedCalls = field(init=False)
    locations: LocationRecorder = field(default_factory=LocationRecorder)
    libraries: tuple[str, ...] = ()
    census: TensorCensus = field(default_factory=TensorCensus)
    forward_hooks: ForwardHooks = field(init=False)
    operations: OperationRecorder = field(default_factory=OperationRecorder)
    steps: list[StepObservation] = field(default_factory=list)
    skipped: int = 0  # steps that the trainer took without an optimizer
    optimizers: dict[int, ObservedOptimizer] = field(default_factory=dict)  # by optimizer id: those that step tensors
    probes: dict[int, TensorProbe] = field(default_factory=dict)  # by id of the stepped tensor
    links: dict[int, MasterLink] = field(default_factory=dict)  # by id of the stepped tensor
    averages: AverageWatch = field(default_factory=AverageWatch)
    unstepped: UnsteppedParameters = field(default_factory=UnsteppedParameters)
    live_names: dict[int, str] = field(default_factory=dict)  # names of the models' parameters by id
    live_storages: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.forward_hooks = ForwardHooks(self.guard)
        self.calls = PatchedCalls(self.guard, self.forward_hooks.note_backward)

    def optimized_ids(self) -> set[int]:
        """Return the ids of all tensors that optimizers step or hold, and of the parameters these stand for."""
        held_ids = {id(tensor) for observed in self.optimizers.values() for tensor in optimizer_tensors(observed.optimizer)}
        stepped_ids = {tensor_id for observed in self.optimizers.values() for tensor_id in observed.snapshots}
        return held_ids | stepped_ids | {parameter_id for link in self.links.values() for _, parameter_id in link.covers}

    def stepped_ids(self) -> set[int]:
        """Return the ids of all tensors that optimizers were seen to step, and of the parameters these stand for."""
        stepped = {tensor_id for observed in self.optimizers.values() for tensor_id in observed.snapshots}
        return stepped.union(*(self.covered_ids(tensor_id) for tensor_id in stepped))

    def is_live(self, tensor: Tensor) -> bool:
        """Return whether a model computes with this very tensor."""
        return id(tensor) in self.live_names or storage_address(tensor) in self.live_storages

    def covered_ids(self, tensor_id: int) -> set[int]:
        """Return the ids of a stepped tensor and of the parameters it stands for."""
        link = self.links.get(tensor_id)
        return {tensor_id} if link is None else {tensor_id, *(parameter_id for _, parameter_id in link.covers)}

    def is_unlinked(self, tensor: Tensor) -> bool:
        """Return whether a stepped tensor is no parameter of a model, and stands for none that is known."""
        return len(self.covered_ids(id(tensor))) == 1 and not self.is_live(tensor)


def optimizer_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return all tensors in an optimizer's groups."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def optimizer_state(optimizer: Optimizer, tensor: Tensor) -> Mapping[str, Any]:
    """Return the state that an optimizer holds for a tensor, by name: empty if it holds none, or something unknown."""
    state = optimizer.state.get(tensor, {})
    return {"state": state} if isinstance(state, Tensor) else state if isinstance(state, Mapping) else {}


def named_schedules(schedules: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield schedules with unique names, made from their classes."""
    return zip(unique_names(type(schedule).__name__ for schedule in schedules), schedules, strict=True)


def unique_names(kinds: Iterable[str]) -> Iterator[str]:
    """Yield a unique name per item: the second of a kind is called `kind 2`."""
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
        yield kind if counts[kind] == 1 else f"{kind} {counts[kind]}"
