"""What an observer writes down: plain facts of one rank, free of torch, so that rules read them anywhere.

A fact is something that was seen. What could not be seen is not left empty: `RankFacts.missing` names it, with the reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FACTS_VERSION = 1
# Collectives that add up what ranks hold
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})

# The sections that facts come in, and what each holds. A rule names those it reads.
SECTIONS = {
    "stepped": "the tensors the optimizer updates, their dtypes and those of their state",
    "options": "learning rates, betas, eps and weight decay of the tensors stepped",
    "numbers": "what steps did to those tensors",
    "links": "which live parameter a stepped tensor stands for",
    "parameters": "the model's parameters",
    "buffers": "the model's buffers",
    "gradients": "dtype of gradients, and where micro-batches accumulate them",
    "collectives": "dtypes that gradients are reduced in",
    "steps": "the course of each step: micro-batches, learning rates, norms",
    "schedule": "schedules, their rates and how often they advance",
    "clip": "the norm that clipping reported",
    "scaler": "loss scaling and the steps it skipped",
    "products": "dtypes of matrix products",
    "autocast": "whether autocast was on in the forward pass",
    "loads": "optimizer state that was loaded",
    "setup": "who shards and reduces, as found and as asked for",
    "prepared": "what was handed to accelerate's prepare",
    "process": "torch's process-wide defaults",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusEntry:
    """How many tensors of one kind, dtype and device a rank holds.

    `kind` is parameter, buffer, gradient (of a live parameter), master, master_gradient, step, or the optimizer's own name of a
    state tensor (exp_avg, exp_avg_sq, momentum_buffer, ...); or product or reduction: then `tensors` counts the matrix products
    of one step's forward pass, and elements and bytes are those of their results, or it counts the reductions over ranks
    of one step. Elements and bytes are those on this rank.
    """

    rank: int
    kind: str
    dtype: str
    device: str
    tensors: int
    elements: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStatistics:
    """What the steps that were looked at closely did to one stepped tensor, on this rank's part of it.

    Large tensors are judged by a sample of their elements. An update is what the optimizer's arithmetic gives in float32 from
    the same weights, gradients and state; only elements with a gradient count. Shares are of the elements looked at; None was
    not looked at.
    """

    steps: int = 0  # looked at closely
    updates: int = 0  # elements x steps whose update is not zero
    updates_lost: int = 0  # of these, how many left the stored weight as it was
    update_squared: float = 0.0  # sum of u^2
    update_dot: float = 0.0  # sum of u * what the stored weight really moved by; over update_squared it is the EDQ
    # Steps over which the whole tensor stayed bit-identical although its update was never zero throughout.
    pinned_steps: int = 0
    gradient_squared: float | None = None  # of the whole local gradient the optimizer read, last step looked at
    second_moment_zero: float | None = None  # v == 0 after the step where the gradient is not zero
    second_moment_stalled: float | None = None  # 16-bit v that v * beta2 rounds back to
    # Before the first step that was seen:
    steps_before: int | None = None  # the optimizer's own count for this tensor: above 0, it was loaded or had run already
    # Share exactly representable in bfloat16, of "weight", exp_avg, ... in float32: of the elements that are not zero and whose
    # moments say that they had a gradient before. What was never updated keeps the values it was made of.
    bf16_valued: dict[str, float] = field(default_factory=dict)
    live_differs_first: float | None = None  # live != cast(stepped) before the first step seen
    live_differs: float | None = None  # the same after steps: the worst seen


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedTensor:
    """One tensor that the innermost optimizer updates, and the state it updates it with.

    `name` is the parameter's name before any wrapping, or where the tensor hangs (`DeepSpeedZeroOptimizer.attribute[0]`) when
    it holds many parameters, and `covers` then names those. `live` says that the model computes with this very tensor;
    `live_dtype` and `live_device` are those of the live parameter it stands for (of itself, if live), None if none is known.
    `shape` is the shape as stepped, on this rank; `live_ndim` the dimensions that the parameter has unsharded, if known.
    `state` maps state names to dtypes and `state_devices` to devices.
    """

    name: str
    optimizer: str
    dtype: str
    device: str
    shape: tuple[int, ...]
    elements: int
    live: bool
    live_dtype: str | None = None
    live_device: str | None = None
    live_ndim: int | None = None
    covers: tuple[str, ...] = ()
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    decoupled_decay: bool | None = None  # weight decay shrinks the weight itself, instead of adding to its gradient
    gradient_dtype: str | None = None
    state: dict[str, str] = field(default_factory=dict)
    state_devices: dict[str, str] = field(default_factory=dict)
    compensation: str | None = None  # what keeps updates of 16-bit tensors from being lost, if anything does
    offload: str | None = None  # a declared offload of masters or state to another device, in the words of its setting
    step_count: float | None = None  # the optimizer's own, after the last step seen
    numbers: UpdateStatistics = field(default_factory=UpdateStatistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueOptimizer:
    """An optimizer that the census cannot read, and why: what it does is unknown, and unknown never passes."""

    optimizer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A parameter or buffer of the model as it is held on this rank. `ndim` is unsharded, None if unknown."""

    name: str
    dtype: str
    device: str
    elements: int
    ndim: int | None = None
    trainable: bool = False
    gradient: str | None = None  # dtype of a gradient that backward left on it
    # A tensor that is stepped stands for it. None is unknown: nobody looked, or it moves and nobody was seen to step it.
    linked: bool | None = None
    module: str | None = None  # class of the module that holds it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One optimizer step as it went. Rates are those in force when the tensors were stepped, one a parameter group."""

    step: int  # from 1, of those seen
    micro_batches: int | None = None  # forward passes of the outermost module that recorded gradients
    rates: dict[str, tuple[float, ...]] = field(
        default_factory=dict
    )  # by optimizer; those of one class are numbered if they differ
    schedule_rates: dict[str, tuple[float, ...]] = field(
        default_factory=dict
    )  # by schedule, but for those whose optimizer waits
    schedule_steps: dict[str, int] = field(default_factory=dict)  # how often each schedule had advanced before this step
    reported_norm: float | None = None  # what clipping returned for this step
    max_norm: float | None = None  # what it was asked for
    # Of the gradients the optimizer read, this rank's part; where clipping was handed some of them only, of those.
    stepped_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning-rate schedule found alive, and the class of the optimizer it writes to."""

    name: str
    optimizer: str
    reaches: bool | None = None  # writes into parameter groups that a stepping optimizer (or a wrapper of it) shows


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """Collectives of one kind and dtype in one step; `bytes` as in `benchbox.observer.hooks.collectives`."""

    operation: str  # all_reduce, reduce_scatter, all_gather, ...
    dtype: str
    count: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredReduction:
    """A dtype that something says it reduces gradients in, and who says so."""

    source: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaler:
    """Loss scaling: how many steps were asked for while steps were seen, and how many were skipped."""

    name: str
    steps: int
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """Autocast as found when the outermost module was entered."""

    active: bool
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoad:
    """One `load_state_dict` of an optimizer: state names with dtypes as given, as held after it, and as held before."""

    optimizer: str
    given: dict[str, tuple[str, ...]]
    held: dict[str, tuple[str, ...]]
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Who shards and reduces. `requested` and `mixed_precision` are what the framework was told, with the source of that."""

    backend: str
    model_class: str
    sharding: str | None
    requested: str | None = None
    mixed_precision: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedByAccelerate:
    """What accelerate knows of optimizers: those it wrapped, those that step without it, and its accumulation."""

    accumulation: int
    wrapped: tuple[str, ...]
    unknown: tuple[str, ...]  # optimizers that step and were not wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What was declared: dtypes by place, None where nothing is declared. `source` says by whom (a recipe, a flag)."""

    source: str
    storage: str | None = None
    compute: str | None = None
    stepped: str | None = None
    moments: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Everything seen on one rank. `missing` maps each section of `SECTIONS` that was not seen to the reason."""

    rank: int
    world_size: int
    source: str  # session, command, checkpoint
    optimizer_chain: tuple[str, ...] = ()
    entries: tuple[CensusEntry, ...] = ()
    stepped: tuple[SteppedTensor, ...] = ()
    opaque: tuple[OpaqueOptimizer, ...] = ()
    parameters: tuple[LiveTensor, ...] = ()
    buffers: tuple[LiveTensor, ...] = ()
    accumulated_in: tuple[str, ...] = ()  # dtypes of gradients that later micro-batches of the same step were added to
    collectives: tuple[CollectiveUse, ...] = ()
    reduction: ConfiguredReduction | None = None
    steps: tuple[StepFacts, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    scaler: Scaler | None = None
    products: dict[str, int] = field(default_factory=dict)  # matrix products of the forward pass by dtype
    autocast: Autocast | None = None
    loads: tuple[StateLoad, ...] = ()
    setup: Setup | None = None
    prepared: PreparedByAccelerate | None = None
    groups: tuple[tuple[float, int], ...] = ()  # weight decay and number of tensors of each parameter group, empty ones too
    strangers: tuple[str, ...] = ()  # tensors that optimizers hold, that had no gradient and are no parameter of the model
    default_decay: float | None = None  # the weight decay the optimizer was built with, where groups name none
    default_dtype: str | None = None
    contract: Contract | None = None
    missing: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # what the observer itself failed at

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"facts_version": FACTS_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> RankFacts:
        """The reverse of `to_dict`, after JSON made lists of tuples."""
        values = {name: value for name, value in held.items() if name != "facts_version"}
        for name, kind in _MANY.items():
            values[name] = tuple(_rebuilt(kind, each) for each in values.get(name, ()))
        for name, single in _ONE.items():
            values[name] = None if values.get(name) is None else single(**values[name])
        for name in ("optimizer_chain", "accumulated_in", "strangers", "problems"):
            values[name] = tuple(values.get(name, ()))
        values["groups"] = tuple((decay, tensors) for decay, tensors in values.get("groups", ()))
        if values["prepared"] is not None:
            found = values["prepared"]
            values["prepared"] = PreparedByAccelerate(
                accumulation=found.accumulation, wrapped=tuple(found.wrapped), unknown=tuple(found.unknown)
            )
        return cls(**values)


_MANY: dict[str, Any] = {
    "entries": CensusEntry,
    "stepped": SteppedTensor,
    "opaque": OpaqueOptimizer,
    "parameters": LiveTensor,
    "buffers": LiveTensor,
    "collectives": CollectiveUse,
    "steps": StepFacts,
    "schedules": Schedule,
    "loads": StateLoad,
}
_ONE: dict[str, Any] = {
    "reduction": ConfiguredReduction,
    "scaler": Scaler,
    "autocast": Autocast,
    "setup": Setup,
    "prepared": PreparedByAccelerate,
    "contract": Contract,
}


def _rebuilt(kind: Any, held: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in held.items()}
    if kind is SteppedTensor:
        values["numbers"] = UpdateStatistics(**values["numbers"])
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}
    return kind(**values)


def all_stepped_tensors(facts: Iterable[RankFacts]) -> Iterator[tuple[int, SteppedTensor]]:
    """(rank, tensor) for every stepped tensor of every rank that holds a part of it."""
    for each in facts:
        for tensor in each.stepped:
            if tensor.elements:
                yield each.rank, tensor


def edq(numbers: Iterable[UpdateStatistics]) -> float | None:
    """Effective descent quality, <u, what arrived> / |u|^2, over several tensors: 1 when every update arrives (Collage,
    arXiv:2405.03637). None where no update was computed.
    """
    held = list(numbers)
    squared = sum(each.update_squared for each in held)
    return sum(each.update_dot for each in held) / squared if squared else None
