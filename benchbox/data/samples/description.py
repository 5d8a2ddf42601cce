"""Description of the data that is trained on, for records and for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benchbox.data.format.metadata import ACTION, STATE
from benchbox.data.samples.mixture import MixtureSamples, drawn_shares, slot_name
from benchbox.data.samples.selection import count_frames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.data.samples.mixture import MixtureDataset
    from benchbox.registry.contracts import Batch
    from benchbox.registry.launch_record import DataRecord, DatasetRecord
    from benchbox.spec.cell import DataSpec


class DataUse:
    """Description of the data of a stream, with the number of samples that were drawn of each dataset."""

    def __init__(self, description: DataRecord) -> None:
        self._description = description
        self._drawn = torch.zeros(len(description["datasets"]), dtype=torch.int64)

    def count(self, batch: Batch) -> None:
        """Count the samples of a batch."""
        if len(self._drawn):
            self._drawn += torch.bincount(batch["dataset_index"], minlength=len(self._drawn))

    def record(self) -> DataRecord:
        """Return the description, with the samples drawn until now."""
        datasets = zip(self._description["datasets"], self._drawn.tolist(), strict=True)
        return {**self._description, "datasets": [{**dataset, "drawn": drawn} for dataset, drawn in datasets]}


def describe_data(data: DataSpec, samples: object) -> DataRecord:
    """Return what is trained on. Generated samples have no datasets."""
    if not isinstance(samples, MixtureSamples):
        return {"kind": data.kind, "mode": data.mode, "validation": 0.0, "cameras": [], "datasets": []}
    return {
        "kind": data.kind,
        "mode": data.mode,
        "validation": data.validation,
        "cameras": list(samples.cameras),
        "datasets": describe_datasets(samples.members),
    }


def describe_datasets(members: Sequence[MixtureDataset]) -> list[DatasetRecord]:
    """Return what is trained on of each dataset of a mixture."""
    return [_describe(member, share) for member, share in zip(members, drawn_shares(members), strict=True)]


def _describe(member: MixtureDataset, share: float) -> DatasetRecord:
    dataset, settings, selection = member.dataset, member.settings, member.selection
    state_dim, action_dim = (int(np.prod(dataset.features[name]["shape"])) for name in (STATE, ACTION))
    return {
        "dataset": settings.path,
        "source": settings.source_name,
        "control_mode": settings.control_mode,
        "robot_type": dataset.info.get("robot_type"),
        "fps": dataset.fps,
        "cameras": [slot_name(camera, settings) for camera in dataset.cameras],
        "state_dim": state_dim,
        "action_dim": action_dim,
        "episodes": selection.episodes,
        "frames": selection.frames,
        "keep": settings.keep,
        "kept_episodes": selection.kept_episodes,
        "kept_frames": selection.kept_frames,
        "training_episodes": selection.training_episodes,
        "training_frames": count_frames(selection.training),
        "validation_episodes": selection.validation_episodes,
        "validation_frames": count_frames(selection.validation),
        "weight": settings.weight,
        "share": share,
        "drawn": None,
    }


def summarise_selection(member: MixtureDataset, share: float) -> str:
    """Return a line on a dataset: its size and rate, and how much of it is drawn. It is the same for every seed."""
    settings, selection = member.settings, member.selection
    parts = [f"{selection.episodes:,} episodes, {selection.frames:,} frames at {member.dataset.fps:g} frames/s"]
    if settings.keep is not None:
        parts.append(f"{settings.keep} {selection.kept}")
    if selection.validation_episodes:
        parts.append(f"{selection.validation_episodes:,} of {selection.kept_episodes:,} episodes for validation")
    if settings.weight is not None:
        parts.append(f"{share:.1%} of drawn samples")
    return f"{settings.path}: {'; '.join(parts)}"
