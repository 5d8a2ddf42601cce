"""The launch record, key by key. A public surface: keys are added, never renamed, and a new meaning gets a new key.

Times are seconds, memory is bytes, `per_rank` lists are in rank order. An unknown value is null, and where a reader could
wonder why, a `reason` stands beside it. A number that JSON cannot hold (NaN, infinity) is null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from benchbox.errors import RecordError
from benchbox.registry.statuses import STATUSES

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1


class Error(TypedDict):
    """Why a launch did not end ok."""

    type: str  # class name of the exception, or Killed, LaunchError, MissingRank, ...
    message: str
    rank: int | None
    phase: str | None
    traceback: str | None


class Weights(TypedDict):
    """What the policy took of published weights. One name stands for those of all layers."""

    loaded: int  # parameters
    missing: list[str]  # parameters that are as they were initialised
    unexpected: list[str]  # published tensors without a place in the policy
    fitted: dict[str, str]  # parameter -> what was done to fit one of another size


class Observed(TypedDict):
    """Read from live objects, never from configuration. A value the ranks do not share is a list in rank order."""

    backend: str
    model_class: str
    optimizer_chain: list[str]  # outermost first
    sharding: str
    shard_numel: list[int | None]  # parameter elements held, one a rank
    trainable_numel: int  # parameter elements of the whole policy that train, added up over shards
    total_numel: int  # and all there are; before `trainable_numel` was recorded, those that train
    attention_kernel: str | None
    checkpointed_modules: int | None
    world_size: int
    device: list[str]  # one a rank
    weights: NotRequired[Weights | None]  # null where none were asked for


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
    """Peak memory of one rank since the warm-up boundary."""

    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None


class WorstPeak(Peak):
    """The largest figures over ranks, and the rank that had to hold most (by reserved bytes where they are known)."""

    rank: int


class Memory(TypedDict):
    """Peak memory, and what was counted: `torch.cuda` is device memory, `tensor_storage` bytes of live tensors on the host."""

    source: str
    reason: str | None  # why a figure is null
    per_rank: list[Peak]
    worst: WorstPeak


class Collective(TypedDict):
    """One operation in one step: the largest over ranks."""

    count: int
    bytes: int


class TowerFlops(TypedDict):
    """Of one part of the policy, by formula. `recomputed` is not part of the other two."""

    forward: int
    backward: int
    recomputed: int


class Flops(TypedDict):
    """Floating-point operations of one step, summed over ranks: what was counted, and by formula what each tower costs."""

    model_flops_per_step: int | None
    recomputed_flops_per_step: NotRequired[int | None]
    reason: str | None
    per_tower: NotRequired[dict[str, TowerFlops] | None]  # null where the policy does not say what it costs


class Precision(TypedDict):
    """What every rank's parameters, gradients and optimizer states are made of, and the rules that fired."""

    census: list[dict[str, Any]]  # rank, kind, dtype, device, tensors, elements, bytes
    findings: list[dict[str, Any]]  # code, severity, title, where, rank, evidence, repair
    not_judged: dict[str, str]  # rule -> why it could not be judged
    numbers: dict[str, float | None]  # edq, updates_lost, second_moment_stalled: over all ranks
    problems: list[str]  # what the witnesses themselves failed at: then what they say is not the whole


class _Later(TypedDict, total=False):
    """Keys that the first records of this schema lack."""

    hfu: float | None  # hardware FLOPs utilisation: recomputation is in it; as `mfu` otherwise


class LaunchRecord(_Later):
    """One fresh process group running one cell."""

    schema_version: int
    cell_id: str
    cell: dict[str, Any]  # Cell.to_dict()
    launch: int  # from 1
    status: str  # one of STATUSES
    error: Error | None
    warmup_steps: int
    steps: int  # measured steps asked for
    observed: Observed | None
    step_time_s: StepTime | None
    phases_s: dict[str, Phase] | None
    fused_phases: dict[str, str]  # phase -> why it has no time of its own
    throughput: Throughput | None
    memory: Memory | None
    collectives: dict[str, Collective] | None
    flops: Flops | None
    mfu: float | None  # model FLOPs utilisation, the lowest over ranks
    mfu_reason: str | None  # why mfu and hfu are null
    precision: Precision | None
    samples: list[int] | None  # consumed in the measured steps, counted by every rank
    loss: list[float | None] | None  # every step from the first warm-up step, mean over the global batch
    grad_norm: list[float | None] | None  # the same steps, before clipping
    environment: dict[str, Any] | None
    config: dict[str, Any]  # fully resolved
    started_at: str  # ISO 8601, UTC
    duration_s: float  # of the launch, start to end


REQUIRED = frozenset(LaunchRecord.__required_keys__)


def check_version(value: Mapping[str, Any], where: str) -> None:
    """Refuse a file that a newer benchbox wrote, or none.

    Raises:
        RecordError: and what to do about it.
    """
    version = value.get("schema_version")
    if not isinstance(version, int):
        raise RecordError(f"{where}: no schema_version, so not written by benchbox")
    if version > SCHEMA_VERSION:
        raise RecordError(f"{where}: schema version {version}; this benchbox reads up to {SCHEMA_VERSION}: upgrade it")


def check_record(value: Mapping[str, Any], where: str) -> None:
    """Refuse what is not a launch record this version can read.

    Raises:
        RecordError: a newer schema, an unknown status, or missing keys.
    """
    check_version(value, where)
    missing = sorted(REQUIRED - value.keys())
    if missing:
        raise RecordError(f"{where}: missing {', '.join(missing)}; delete it and run again to measure what it held")
    if value["status"] not in STATUSES:
        raise RecordError(f"{where}: unknown status {value['status']!r}")
