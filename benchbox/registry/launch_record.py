"""The launch record, key by key. A public surface: keys are added, never renamed, and a new meaning gets a new key.

Times are seconds, memory is bytes, `per_rank` lists are in rank order. An unknown value is null, and a `reason` key gives the
cause where it is not obvious. A number that JSON cannot represent (NaN, infinity) is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from benchbox.registry.launch_environment import LaunchEnvironment  # noqa: TC001 (types are read at run time)

# `Cell.to_dict()`. Its fields are declared once, in `benchbox.spec.cell.Cell`, so they are not repeated as a TypedDict here.
CellDict = Mapping[str, Any]

Setting = bool | int | float | str | None


class CollectiveCall(TypedDict):
    """One collective that a rank called, as torch's flight recorder has it."""

    group: str
    ranks: list[int] | None  # of the group; null where torch does not say
    sequence: int  # of the call within its group, from 1: ranks that agree call the same collective under the same number
    operation: str
    dtypes: list[str]  # of the inputs
    shapes: list[list[int]]  # of the inputs
    is_done: bool  # on this rank


class RankPosition(TypedDict):
    """Position of one rank of a stuck group."""

    rank: int
    stage: str | None
    step: int | None
    phase: str | None
    collective: CollectiveCall | None  # the one that the rank waited for; null when it was in none, or `reason` says why
    last_collectives: list[CollectiveCall]  # oldest first
    stack: str | None  # of its main thread, in Python
    reason: str | None  # why its collectives are unknown


class ErrorRecord(TypedDict):
    """Cause of a launch that did not end ok."""

    type: str  # class name of the exception, or Killed, LaunchError, MissingRank, ...
    message: str
    rank: int | None
    phase: str | None
    traceback: str | None
    stage: NotRequired[str | None]  # of the job, where the rank reported it
    step: NotRequired[int | None]
    operation: NotRequired[str | None]  # that needed the memory, where it is known
    ranks: NotRequired[list[RankPosition]]  # of a group that was stuck, or whose ranks called different collectives


class WeightsRecord(TypedDict):
    """Published weights that the policy was initialised with. One name stands for the parameters of all layers."""

    loaded: int  # number of parameters
    missing: list[str]  # parameters that kept their random initialisation
    unexpected: list[str]  # published tensors that the policy has no parameter for
    fitted: dict[str, str]  # parameter -> how a tensor of another size was adapted to it


class PartSizes(TypedDict):
    """Size of one part of the micro-batches of the measured steps: columns of cameras, or tokens of a text."""

    smallest: int
    largest: int
    spec: int  # that the policy's `BatchSpec` asks for, up to which there is padding


class ObservedOnEveryRank(TypedDict):
    """Observations that must be the same on all ranks."""

    backend: str
    model_class: str
    optimizer_chain: list[str]  # outermost first
    sharding: str | None
    trainable_numel: NotRequired[int]  # trainable parameter elements of the whole policy, summed over shards
    total_numel: int  # all parameter elements; the trainable ones in records without `trainable_numel`
    attention_kernel: str | None
    checkpointed_modules: int | None
    world_size: int
    weights: NotRequired[WeightsRecord | None]  # null when none were requested
    construction: NotRequired[str]  # on the meta device, or directly and why
    unused_parameters: NotRequired[list[str] | None]  # frozen: no loss depends on them; null where not looked for, or unknown
    unused_parameters_reason: NotRequired[str | None]  # why they are unknown
    attention_sites: NotRequired[dict[str, list[str]]]  # module -> kernels that it called
    micro_batch_sizes_reason: NotRequired[str | None]  # why they are unknown
    settings: NotRequired[dict[str, Setting]]  # of the backend, in force: prefetch, bucket sizes, dtype of reductions, ...


class ObservedRecord(ObservedOnEveryRank):
    """Values read from live objects, never from the configuration. Values that differ between ranks are lists in rank order."""

    shard_numel: list[int | None]  # parameter elements on each rank
    device: list[str]  # cpu, or the name of a GPU: see `device_type`
    video_decoder: NotRequired[list[str | None]]  # null where no video is decoded
    micro_batch_sizes: NotRequired[list[dict[str, PartSizes] | None]]  # by part; null for a policy that generates its batches


def device_type(name: str) -> str:
    """Return torch's name of the kind of a device that a record has under `observed`: cpu, or cuda for the name of a GPU."""
    return "cpu" if name == "cpu" else "cuda"


class StepTime(TypedDict):
    """Wall time of every measured step."""

    per_rank: list[list[float]]  # [rank][step]
    slowest: list[float]  # [step], the largest over ranks


class Phase(TypedDict):
    """Time of one phase in every measured step."""

    per_rank: list[list[float]]  # [rank][step]


class Throughput(TypedDict):
    """Samples per second; the global figure is that of the slowest rank."""

    global_samples_per_s: float  # batch * accumulation * world_size / median over steps of (max over ranks of step time)
    per_rank_samples_per_s: list[float]


class Peak(TypedDict):
    """Peak memory of one rank since the end of the warm-up."""

    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None


class WorstPeak(Peak):
    """The largest figures over ranks, and the rank that needed most (by reserved bytes where they are known).

    The rank is null where a rank's peak is unknown.
    """

    rank: int | None


class Memory(TypedDict):
    """Peak memory, and its source: `torch.cuda` is device memory, `tensor_storage` bytes of live tensors on the host."""

    source: str
    reason: str | None  # why a figure is null
    per_rank: list[Peak]
    worst: WorstPeak
    device_bytes: NotRequired[list[int | None]]  # [rank] memory of the device; absent on a host
    allocation_retries: NotRequired[list[int | None]]  # [rank] since the start, by which the allocator freed its cache


class CollectiveRecord(TypedDict):
    """Calls of one collective in one step: the largest figures over ranks."""

    count: int
    bytes: int


class TowerFlops(TypedDict):
    """FLOPs of one part of the policy, by formula. `recomputed` is not included in the other two."""

    forward: int
    backward: int
    recomputed: int


class GraphBreak(TypedDict):
    """A place at which torch.compile cut a function into several graphs."""

    where: str  # file:line
    reason: str
    count: int


class Recompilation(TypedDict):
    """A function that torch.compile compiled again, and the guard that failed."""

    function: str
    reason: str


class UncompiledFunction(TypedDict):
    """A function that runs uncompiled, and why: torch.compile gave it up, or the guard that asked for one more variant."""

    function: str
    reason: str


class CompilationRecord(TypedDict):
    """Work of torch.compile on one rank until the end of the measured steps.

    A graph that was found in a cache on disk, which an earlier launch has written, was only loaded.
    """

    graphs: int  # of forward passes, each with its backward
    graph_breaks: list[GraphBreak]
    recompilations: list[Recompilation]
    limits_reached: NotRequired[list[UncompiledFunction]]  # what none of their variants fits runs uncompiled
    uncompiled: NotRequired[list[UncompiledFunction]]
    time_s: float  # of all compilations
    from_cache: int  # pieces of compiled code that were loaded: a graph has one of its forward pass and one of its backward
    not_from_cache: int  # those that were compiled
    in_measured_steps: int  # compilations; the times of these steps are not those of training


class Compilation(TypedDict):
    """Work of torch.compile, by rank; where compile is off, of the ranks that compiled anything all the same."""

    per_rank: list[CompilationRecord]


class Flops(TypedDict):
    """Floating-point operations of one step: the number counted, and the cost of each tower by formula.

    In a launch record they are sums over ranks.
    """

    model_flops_per_step: int | None
    recomputed_flops_per_step: NotRequired[int | None]
    reason: str | None
    per_tower: NotRequired[dict[str, TowerFlops] | None]
    per_tower_reason: NotRequired[str | None]  # why `per_tower` is null: the policy declares no cost


class CensusRecord(TypedDict):
    """Count of the tensors of one kind, dtype and device on one rank."""

    rank: int
    kind: str
    dtype: str
    device: str
    tensors: int
    elements: int
    bytes: int


class FindingRecord(TypedDict):
    """A rule of the precision audit that fired."""

    code: str
    severity: str
    title: str
    where: str
    rank: int | None
    evidence: dict[str, Any]
    repair: str


class Precision(TypedDict):
    """Dtypes of every rank's parameters, gradients and optimizer states, and the rules that fired."""

    census: list[CensusRecord]
    findings: list[FindingRecord]
    not_judged: NotRequired[dict[str, str]]  # rule -> why it could not be judged
    numbers: NotRequired[dict[str, float | None]]  # edq, updates_lost, second_moment_stalled: over all ranks
    problems: NotRequired[list[str]]  # failures of the observers: when there are any, the other keys are incomplete


class StartEnd(TypedDict):
    """A value before and after the measured steps."""

    start: float | None
    end: float | None


class HostRecord(TypedDict):
    """State of one host over the measured steps. `reasons` gives the cause of every key that is null.

    Shares are of the CPU time that all cores of the host had. Processes of the launch are the ranks and their children.
    """

    ranks: list[int]
    window_s: float
    cores: int
    launch_cpu_share: float | None
    other_cpu_share: float | None  # used by processes that are not of the launch
    steal_share: float | None  # taken by the hypervisor
    load_average: StartEnd | None  # over one minute; the launch itself is part of it
    frequency_mhz: StartEnd | None  # mean over cores
    thermal_throttle_events: int | None
    quota_throttled_s: float | None  # time in which the launch's CPU quota was used up
    reasons: dict[str, str]


class DeviceRecord(TypedDict):
    """State of one rank's NVIDIA device over the measured steps, from NVML. `reasons` gives the cause of every null."""

    rank: int
    utilisation: float | None  # at the end, of all processes
    other_processes: int | None  # at the end
    other_memory_bytes: int | None  # at the end
    other_utilisation: float | None  # of the multiprocessors, mean
    sm_clock_mhz: StartEnd | None
    memory_clock_mhz: StartEnd | None
    power_w: StartEnd | None
    temperature_c: StartEnd | None
    throttle_reasons: list[str] | None  # at the start or at the end
    energy_j: float | None
    reasons: dict[str, str]


class HostState(TypedDict):
    """State of all hosts and devices of a launch over its measured steps."""

    hosts: list[HostRecord]
    devices: list[DeviceRecord] | None
    devices_reason: str | None  # why `devices` is null
    energy_j_per_sample: float | None  # of all devices; null where a device does not count energy


class DatasetRecord(TypedDict):
    """A dataset of the mixture that was trained on, and the frames that were drawn of it."""

    dataset: str  # its path, or `sample`
    source: str
    control_mode: str
    robot_type: str | None  # null where the dataset does not say
    fps: float  # of the dataset: frames are not resampled
    cameras: list[str]  # after renaming
    state_dim: int
    action_dim: int
    episodes: int
    frames: int
    keep: str | None  # file of the ranges that are kept
    kept_episodes: int  # with a frame that is kept
    kept_frames: int
    training_episodes: int
    training_frames: int
    validation_episodes: int
    validation_frames: int
    weight: float | None  # null where no dataset has one: each frame is drawn once per epoch
    share: float  # of the drawn samples that are of this dataset, as configured
    drawn: int | None  # samples of this dataset in the warm-up and measured steps of all ranks; null before any was drawn


class DataRecord(TypedDict):
    """The data that was trained on. Generated samples have no datasets."""

    kind: str
    mode: str  # what was given, and what was predicted
    validation: float  # share of the episodes that is not trained on
    cameras: list[str]  # in the slots of the policy
    datasets: list[DatasetRecord]


class _LaterKeys(TypedDict, total=False):
    """Keys that the first records of this schema lack."""

    data: DataRecord | None
    hfu: float | None  # hardware FLOPs utilisation: includes recomputation, otherwise as `mfu`
    host: HostState | None  # null where a rank did not end
    memory_limit_bytes: int | None  # that one rank was allowed; null where only the device sets a limit
    skipped_steps: list[int] | None  # numbers, from 0, of the steps in `loss` that `optim.spike` skipped
    step_split_s: dict[str, Phase] | None  # part of a step, of STEP_PARTS -> its time on every rank; they add up to the step
    step_split_reason: str | None  # why it is null
    unchecked_reason: str | None  # why the measured values were not checked against the request; such a launch is never ok


class LaunchRecord(_LaterKeys):
    """Measurement of one fresh process group running one cell."""

    schema_version: int
    cell_id: str
    cell: CellDict
    launch: int  # from 1
    status: str  # one of STATUSES
    error: ErrorRecord | None
    warmup_steps: int
    steps: int  # measured steps requested
    observed: ObservedRecord | None
    step_time_s: StepTime | None
    phases_s: dict[str, Phase] | None
    fused_phases: dict[str, str]  # phase -> why it has no time of its own
    throughput: Throughput | None
    memory: Memory | None
    collectives: dict[str, CollectiveRecord] | None
    flops: Flops | None
    compilation: NotRequired[Compilation | None]  # null where compile is off and nothing was compiled
    mfu: float | None  # model FLOPs utilisation, the lowest over ranks
    mfu_reason: str | None  # why mfu and hfu are null
    precision: Precision | None
    samples: list[int] | None  # consumed in the measured steps, counted by every rank
    loss: Sequence[float | None] | None  # every step from the first warm-up step, mean over the global batch
    grad_norm: Sequence[float | None] | None  # the same steps, before clipping
    environment: LaunchEnvironment | None
    config: dict[str, Any]  # fully resolved
    started_at: str  # ISO 8601, UTC
    duration_s: float  # of the launch, start to end
