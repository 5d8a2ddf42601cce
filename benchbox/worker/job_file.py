"""Schemas of `job.json`: the launcher writes it, every rank reads it. Values are plain JSON."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


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
    resume: bool  # continue from the newest checkpoint in `folder`
    policy_dirs: list[str]


class LinksJob(TypedDict):
    """Configuration of a job that times collectives."""

    kind: Literal["links"]
    sizes: list[int]  # bytes


class LinksJobFile(LinksJob):
    """Contents of the job file of a measurement of links."""

    out: str
    launcher: int


class MeasureJobFile(MeasureJob):
    """Contents of the job file of a measurement."""

    out: str  # folder of the events, logs and results of ranks
    launcher: int  # its process id


class TrainJobFile(TrainJob):
    """Contents of the job file of a training run."""

    out: str
    launcher: int


JobConfig = MeasureJob | TrainJob | LinksJob
JobFile = MeasureJobFile | TrainJobFile | LinksJobFile
