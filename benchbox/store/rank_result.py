"""The result that one rank writes at its end, `rank<r>.json`.

`benchbox.store.assemble` merges the results of all ranks into one launch record; keys have the meaning they have there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from benchbox.registry.launch_record import CollectiveRecord, Flops, ObservedOnEveryRank, Peak

if TYPE_CHECKING:
    from collections.abc import Sequence


class RankObserved(ObservedOnEveryRank):
    """Observations of one rank."""

    shard_numel: int  # parameter elements on this rank
    device: str


class RankMemory(Peak):
    """Peak memory of one rank, its source, and the reason for a figure that is null."""

    source: str
    reason: str | None


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
    memory: RankMemory
    collectives: dict[str, CollectiveRecord]  # operation -> calls in one step
    flops: Flops
    environment: dict[str, Any]
    config: dict[str, Any]
