"""The result of one rank, `rank<r>.json`: written after the timed steps, and again, complete, after the probe.

`benchbox.store.assemble` merges the results of all ranks into one launch record; keys have the meaning they have there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from benchbox.registry.launch_record import (
    CollectiveRecord,
    CompilationRecord,
    DataRecord,
    DeviceRecord,
    Flops,
    ObservedOnEveryRank,
    PartSizes,
    Peak,
    StartEnd,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.registry.launch_environment import RankEnvironment


class RankObserved(ObservedOnEveryRank):
    """Observations of one rank."""

    shard_numel: int  # parameter elements on this rank
    device: str
    video_decoder: NotRequired[str | None]  # null where no video is decoded
    micro_batch_sizes: NotRequired[dict[str, PartSizes] | None]  # by part; null for a policy that generates its batches


class RankMemory(Peak):
    """Peak memory of one rank, its source, and the reason for a figure that is null."""

    source: str
    reason: str | None
    device_bytes: NotRequired[int]  # memory of the device
    allocation_retries: NotRequired[int]  # by which the allocator freed its cache to go on


class HostCounters(TypedDict):
    """Counters of a host over the measured steps. `reasons` gives the cause of every key that is null."""

    window_s: float
    cores: int
    busy_s: float | None  # CPU time of all processes, over all cores
    steal_s: float | None
    load_average: StartEnd | None
    frequency_mhz: StartEnd | None
    thermal_throttle_events: int | None
    quota_throttled_s: float | None
    reasons: dict[str, str]


class RankHost(TypedDict):
    """Use of the host and the device of one rank over the measured steps."""

    local_rank: int
    cpu_s: float  # CPU time of this rank and its children
    counters: HostCounters | None  # of the host, only from local rank 0
    device: DeviceRecord | None
    device_reason: str | None  # why `device` is null


class BlockedTime(TypedDict):
    """An interval in which a rank waited for collectives. `until` arrival: no longer than until all ranks had arrived."""

    start: int
    end: int
    until: Literal["arrival", "completion"]


class CollectiveTimes(TypedDict):
    """Times of one rank in the measured steps, in ns of its host's clock."""

    clock: str | None  # equal on ranks with the same clock
    steps: list[list[int]]  # [step]: start, end
    arrivals: list[list[list[Any]]]  # [step][collective]: its name, when this rank created it
    blocked: list[list[BlockedTime]]  # [step]
    core_wait_s: list[float] | None  # [step]; null where the system does not count it


class Utilisation(TypedDict):
    """FLOPs utilisation of one rank."""

    mfu: float | None
    hfu: float | None
    mfu_reason: str | None


class RankResult(Utilisation):
    """Measurement of one rank."""

    rank: int
    world_size: int
    observed: RankObserved
    step_time_s: list[float]  # [step]
    phases_s: dict[str, list[float]]  # phase -> [step]
    fused_phases: dict[str, str]  # phase -> why it has no time of its own
    samples: int  # consumed on this rank in the measured steps
    loss: Sequence[float | None]  # every step from the first warm-up step, mean over the global batch
    grad_norm: Sequence[float | None]  # the same steps, before clipping
    skipped_steps: NotRequired[list[int]]  # numbers of those that `optim.spike` skipped
    memory: RankMemory | None  # null until the probe has measured it, on a device without memory counters
    collectives: dict[str, CollectiveRecord] | None  # operation -> calls in one step; null until the probe has counted them
    compilation: NotRequired[CompilationRecord | None]  # null where compile is off and nothing was compiled
    flops: Flops | None  # null until the probe has counted them
    host: NotRequired[RankHost]
    collective_times: NotRequired[CollectiveTimes | None]
    collective_times_reason: NotRequired[str | None]  # why they are null
    data: NotRequired[DataRecord]  # with the samples that this rank drew
    unchecked_reason: str | None
    environment: RankEnvironment
    config: dict[str, Any]
