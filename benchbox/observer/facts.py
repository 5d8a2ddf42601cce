"""Schema of the facts that an observer records on one rank: plain data without torch, which rules read anywhere.

A fact is an observation. A section that could not be observed is not left empty: `RankFacts.missing` gives the reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FACTS_VERSION = 1
# After one or two steps a moment may be a gradient times a power of two, and that gradient may come from bfloat16.
MIN_STEPS_BEFORE_LATER = 3
SIXTEEN_BIT = frozenset({"bfloat16", "float16"})
# Collectives that sum over ranks
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})

# Sections of the facts. A rule declares the sections it reads.
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
    "prepared": "what was passed to accelerate's prepare",
    "averages": "averages of the weights beside the model",
    "process": "torch's process-wide defaults",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusEntry:
    """Number and size of the tensors of one kind, dtype and device on a rank.

    `kind` is parameter, buffer, gradient (of a live parameter), master, master_gradient, step, or the optimizer's name of a
    state tensor (exp_avg, exp_avg_sq, momentum_buffer, ...). Two kinds count operations of one step instead: product counts the
    matrix products of the forward pass, with the elements and bytes of their results, and reduction the reductions over ranks.
    Elements and bytes are those on this rank.
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
    """Statistics of the updates of one stepped tensor over the probed steps, on this rank's shard.

    Large tensors are sampled. An update u is the result of the optimizer's arithmetic in float32 on the same weights, gradients
    and state; only elements with a gradient count. Shares are shares of the sampled elements; None means not probed.
    """

    steps: int = 0  # probed
    updates: int = 0  # elements x steps with a non-zero update
    updates_lost: int = 0  # of these, those that did not change the stored weight
    update_squared: float = 0.0  # sum of u^2
    update_dot: float = 0.0  # sum of u * (movement of the stored weight); divided by update_squared it is the EDQ
    # Steps over which the sample stayed bit-identical although every probed step had an update for it.
    pinned_steps: int = 0
    gradient_squared: float | None = None  # squared norm of the full local gradient that the optimizer read, latest probed step
    second_moment_zero: float | None = None  # v == 0 after the step where the gradient is not zero
    second_moment_stalled: float | None = None  # 16-bit v with round(v * beta2) == v
    # Before the first observed step:
    steps_before: int | None = None  # the optimizer's step count for this tensor: above 0 if its state was loaded or older
    # Share exactly representable in bfloat16, of "weight", exp_avg, ... in float32, among the non-zero elements whose moments
    # show an earlier gradient. Elements that were never updated keep their initial values, whatever their precision.
    bf16_valued: dict[str, float] = field(default_factory=dict)
    # The same two of the moments, before the first later probed step that three steps came before: None and empty without one.
    steps_before_later: int | None = None
    bf16_valued_later: dict[str, float] = field(default_factory=dict)
    live_differs_first: float | None = None  # live != cast(stepped) before the first observed step
    live_differs: float | None = None  # the same after steps: the maximum
    # Of the sample before the first observed step and after the latest probed one, where there are several ranks. Tensors whose
    # elements are all equal before, as those of a new bias, have none.
    digest_before: str | None = None
    digest_after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedTensor:
    """One tensor that the innermost optimizer updates, with its optimizer state.

    `name` is the parameter's name before wrapping. For a tensor that holds many parameters it is the attribute that refers to
    it (`DeepSpeedZeroOptimizer.attribute[0]`), and `covers` names the parameters. `live` means that the model computes with
    this very tensor; `live_dtype` and `live_device` are those of the live parameter it stands for (of itself, if live), None if
    unknown. `shape` is the local shape that is stepped; `live_ndim` the number of unsharded dimensions of the parameter, if
    known. `state` maps names of state tensors to dtypes and `state_devices` maps those with a dimension to
    devices.
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
    decoupled_decay: bool | None = None  # weight decay acts on the weight, not on the gradient
    fused: bool = False  # one kernel computes the whole update in float32, and rounds what it stores once
    gradient_dtype: str | None = None
    state: dict[str, str] = field(default_factory=dict)
    state_devices: dict[str, str] = field(default_factory=dict)
    compensation: str | None = None  # how updates of 16-bit tensors are kept from being lost, if they are
    offload: str | None = None  # a declared offload of masters or state to another device
    step_count: float | None = None  # the optimizer's count after the last observed step
    numbers: UpdateStatistics = field(default_factory=UpdateStatistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueOptimizer:
    """Optimizer whose arithmetic cannot be observed, with the reason.

    Rules pass it only if it is `lossless`: all that it steps are float32 or float64 parameters with which the model computes.
    """

    optimizer: str
    reason: str
    lossless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """Parameter or buffer of the model, as stored on this rank. `ndim` is unsharded, None if unknown."""

    name: str
    dtype: str
    device: str
    elements: int
    ndim: int | None = None
    trainable: bool = False
    gradient: str | None = None  # dtype of its gradient after backward
    # Whether a stepped tensor stands for it. None is unknown: not observed, or it moves and no optimizer was seen to step it.
    linked: bool | None = None
    # Steps that left it unchanged, although it had a gradient for the last of them; 0 of one that was seen to be stepped.
    unmoved_steps: int = 0
    module: str | None = None  # class of the module that owns it


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAverage:
    """A tensor beside the model that may follow a parameter, as an EMA's does, after `steps` observed steps.

    `name` is that of the average, `parameter` that of the parameter. In a sample of its elements, `lagging` counts those eight
    units in the last place (of bfloat16, if the average has more than 16 bits) or more from the parameter, and `stuck` those
    of them that no step changed. `written` means that the tensor was written to.
    """

    name: str
    parameter: str
    dtype: str
    elements: int
    lagging: int
    stuck: int
    written: bool
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts of one optimizer step. Rates are the distinct learning rates in force when the tensors were stepped."""

    step: int  # number among the observed steps, from 1
    micro_batches: int | None = None  # forward passes of the outermost module, each with a backward pass of its own
    ends_epoch: bool = False  # accelerate's data ended, which cuts the accumulation short
    # By optimizer class; several optimizers of one class are numbered if their rates differ.
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # By schedule, without those whose optimizer takes no part in this step.
    schedule_rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    schedule_steps: dict[str, int] = field(default_factory=dict)  # steps of each schedule before this step
    # Of several clippings in a step, the one whose limit is exceeded most:
    reported_norm: float | None = None  # what clipping returned for this step
    max_norm: float | None = None  # the limit passed to clipping
    # Norm of the local gradients that the optimizer read, of the clipped ones only if clipping got only some of them.
    stepped_norm: float | None = None
    clip_scale: float | None = None  # the loss scale that the gradients were divided by after they were clipped
    # Why the gradients that an optimizer computed an update from are unknown: they changed after they were observed.
    changed_gradients: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning-rate schedule of the process, and the class of the optimizer it was built for."""

    name: str
    optimizer: str
    reaches: bool | None = None  # writes into the groups of an optimizer that steps, or of its wrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """Use of one collective with one dtype in one step; `bytes` as in `benchbox.observer.hooks.collectives`."""

    operation: str  # all_reduce, reduce_scatter, all_gather, ...
    dtype: str
    count: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredReduction:
    """Dtype that gradients are configured to be reduced in, and the setting that says so."""

    source: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaler:
    """Loss scaling: the steps requested while steps were observed, and those skipped. A script's own requests none."""

    name: str
    steps: int
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """Autocast when the outermost module was entered."""

    active: bool
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoad:
    """One `load_state_dict` of an optimizer: dtypes by state name, as loaded (`given`), after it (`held`) and before it."""

    optimizer: str
    given: dict[str, tuple[str, ...]]
    held: dict[str, tuple[str, ...]]
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Backend that shards and reduces. `requested` and `mixed_precision` are the framework's settings, read from `source`."""

    backend: str
    model_class: str
    sharding: str | None
    requested: str | None = None
    mixed_precision: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedByAccelerate:
    """Optimizers that accelerate wrapped, those that step without it, and its gradient accumulation."""

    accumulation: int
    wrapped: tuple[str, ...]
    unknown: tuple[str, ...]  # optimizers that step and are not wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLocation:
    """Line of the training's code that made something the audit met.

    `kind` is optimizer or schedule (constructed there; `name` is the class), cast (a module was cast there) or default dtype
    (16 bits became the default of new modules there). The line is the innermost one outside of installed packages, if there is
    one. `stack` holds the calls that led there, innermost first, each as `file:line in function`.
    """

    kind: str
    name: str
    file: str
    line: int
    function: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Declared dtypes, None where nothing is declared. `source` is the origin of the declaration (a recipe, a flag)."""

    source: str
    storage: str | None = None
    compute: str | None = None
    stepped: str | None = None
    moments: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """All facts of one rank. `missing` maps each section of `SECTIONS` that was not observed to the reason."""

    rank: int
    world_size: int
    source: str  # session, command, checkpoint
    optimizer_chain: tuple[str, ...] = ()
    entries: tuple[CensusEntry, ...] = ()
    stepped: tuple[SteppedTensor, ...] = ()
    opaque: tuple[OpaqueOptimizer, ...] = ()
    parameters: tuple[LiveTensor, ...] = ()
    buffers: tuple[LiveTensor, ...] = ()
    averages: tuple[WeightAverage, ...] = ()
    accumulated_in: tuple[str, ...] = ()  # dtypes that gradients of several micro-batches are summed in
    collectives: tuple[CollectiveUse, ...] = ()
    reduction: ConfiguredReduction | None = None
    steps: tuple[StepFacts, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    scaler: Scaler | None = None
    products: dict[str, int] = field(default_factory=dict)  # number of matrix products of the forward pass by dtype
    products_with_gradient: dict[str, int] = field(default_factory=dict)  # of these, the ones outside of torch.no_grad
    autocast: Autocast | None = None
    loads: tuple[StateLoad, ...] = ()
    setup: Setup | None = None
    prepared: PreparedByAccelerate | None = None
    groups: tuple[tuple[float, int], ...] = ()  # (weight decay, tensors) of each parameter group, empty ones too
    strangers: tuple[str, ...] = ()  # tensors in optimizers without a gradient that are no parameter of a model
    default_decay: float | None = None  # the optimizer's default weight decay
    default_dtype: str | None = None
    contract: Contract | None = None
    libraries: tuple[str, ...] = ()  # training libraries that take part in the first step, by package
    locations: tuple[SourceLocation, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # failures of the observer itself

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON values, with the schema version."""
        return {"facts_version": FACTS_VERSION, **_to_json(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RankFacts:
        """Return the facts of a dictionary that `to_dict` made and that may have gone through JSON."""
        values = {name: value for name, value in content.items() if name != "facts_version"}
        for name, kind in _TUPLE_FIELDS.items():
            values[name] = tuple(_from_json(kind, item) for item in values.get(name, ()))
        for name, kind in _OPTIONAL_FIELDS.items():
            values[name] = None if values.get(name) is None else _from_json(kind, values[name])
        for name in ("optimizer_chain", "accumulated_in", "strangers", "libraries", "problems"):
            values[name] = tuple(values.get(name, ()))
        values["groups"] = tuple((decay, tensors) for decay, tensors in values.get("groups", ()))
        return cls(**values)


_TUPLE_FIELDS: dict[str, Any] = {
    "entries": CensusEntry,
    "stepped": SteppedTensor,
    "opaque": OpaqueOptimizer,
    "parameters": LiveTensor,
    "buffers": LiveTensor,
    "averages": WeightAverage,
    "collectives": CollectiveUse,
    "steps": StepFacts,
    "schedules": Schedule,
    "loads": StateLoad,
    "locations": SourceLocation,
}
_OPTIONAL_FIELDS: dict[str, Any] = {
    "reduction": ConfiguredReduction,
    "scaler": Scaler,
    "autocast": Autocast,
    "setup": Setup,
    "prepared": PreparedByAccelerate,
    "contract": Contract,
}


def _to_json(value: Any) -> Any:
    """Return what `asdict` would, in a fraction of the time: it copies every number and string by `deepcopy`."""
    if is_dataclass(value):
        return {entry.name: _to_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, tuple | list):
        return type(value)(map(_to_json, value))
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return value


def _from_json(kind: Any, content: Mapping[str, Any]) -> Any:
    """Return an instance of a facts class: JSON turned its tuples into lists."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    if kind is SteppedTensor:
        values["numbers"] = UpdateStatistics(**values["numbers"])
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
    return kind(**values)
