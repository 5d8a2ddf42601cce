"""Schemas of `job.json`: the launcher writes it, every rank reads it. Values are plain JSON.

The file also has `out`, the folder of the events, logs and results of ranks, and `id`, by which nodes tell a job from one that
had its folder before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MeasureJob(TypedDict):
    """Configuration of a job that measures one cell."""

    kind: Literal["measure"]
    cell: dict[str, Any]  # Cell.to_dict()
    measure: dict[str, Any]  # MeasureSpec as a dictionary
    policy_dirs: list[str]
    launch: int  # from 1


class TrainJob(TypedDict):
    """Configuration of a job that trains."""

    kind: Literal["train"]
    train: dict[str, Any]  # benchbox.spec.train.TrainConfig.to_dict()
    folder: str  # metrics and checkpoints
    checkpoint: str | None  # name of the one in `folder` to continue from, the same on all nodes; null to begin
    policy_dirs: list[str]


class LinksJob(TypedDict):
    """Configuration of a job that times collectives."""

    kind: Literal["links"]
    sizes: list[int]  # bytes


class PeakSizes(TypedDict):
    """Sizes of what is measured on one kind of device."""

    matmul: Mapping[str, Sequence[int]]  # by class of shape: (batch, rows, columns, inner)
    copy: int  # bytes, also of updates in place
    all_reduce: int  # bytes


class PeaksJob(TypedDict):
    """Configuration of a job that measures the peaks of devices."""

    kind: Literal["peaks"]
    sizes: dict[str, PeakSizes]  # by kind of device
    limit_s: float  # of the repetitions of one size


class ProfileJob(TypedDict):
    """Configuration of a job that profiles one cell."""

    kind: Literal["profile"]
    cell: dict[str, Any]  # Cell.to_dict()
    warmup_steps: int
    timed_steps: int
    profiled_steps: int
    traces: str  # folder of the traces
    policy_dirs: list[str]


JobConfig = MeasureJob | TrainJob | LinksJob | PeaksJob | ProfileJob
