"""Validation of a checkpoint without training: the pass of `benchbox train`, over its data or others, in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.data.loading.loader import open_samples
from benchbox.data.samples.digest import check_unchanged, data_differences, digest_datasets
from benchbox.data.samples.mixture import MixtureSamples
from benchbox.errors import ConfigurationError, DataError, Problem
from benchbox.measure.phases import ProgressTracker
from benchbox.session import build_session
from benchbox.spec.cell import Cell, DataSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.spec.validation_section import ValidationSection
from benchbox.store.checkpoints import find_checkpoint, read_manifest
from benchbox.trainer.checkpoint import load_policy
from benchbox.trainer.validation import ValidationPass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.data.text.fast import FastTokenizer
    from benchbox.registry.contracts import BatchSpec

SCHEMA_VERSION = 1
_HINT = "--all-episodes validates all, --data names other data"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointValidation:
    """Settings of the validation of a checkpoint.

    `data` is the path of a LeRobot dataset: one of the training, of which alone the frames are then read, or another in place
    of the data of the training. `all_episodes` are those that were trained on too. None of `batch` is that of the training, of
    `max_samples` all samples, of `workers` those of the training.
    """

    data: Path | None = None
    all_episodes: bool = False
    averages: bool = False  # of the weights, in their place
    batch: int | None = None
    max_samples: int | None = None
    workers: int | None = None


def validate_checkpoint(checkpoint: Path, settings: CheckpointValidation, policy_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the record of a validation: what a row of `validation.jsonl` has, and what was validated on what.

    The precision is that of the training's steps. Other data are normalised by statistics of their own. `data_changes` has a
    line about each dataset of the training that has changed, if all episodes are validated or its FAST tokens are needed.

    Raises:
        ConfigurationError: there are no episodes to validate on, the data do not fit the policy, or those of the training have
            changed, so that other episodes would be held out than were.
        DataError: the checkpoint or a dataset is missing or damaged.
        RecordError: the manifest of the checkpoint is damaged.
        UnsupportedError: one process cannot run the recipe of the training.
    """
    checkpoint = find_checkpoint(checkpoint)
    manifest = read_manifest(checkpoint)
    trained = Cell.from_dict(manifest.cell)
    numbers = _numbers(trained.data, settings.data)
    is_other = settings.data is not None and numbers is None
    cell = _cell_of_one_process(trained, _data(trained, settings, is_other=is_other))
    policy = load_policy(checkpoint, policy_dirs, averages=settings.averages, attention=cell.attention)
    spec, changes = policy.batch_spec(), list[str]()

    def check(of_training: MixtureSamples) -> None:
        saved, digests = manifest.data, digest_datasets(of_training)
        if saved is not None and len(saved) == len(digests) and numbers is not None and not spec.fast_tokens:
            saved, digests = [saved[number] for number in numbers], [digests[number] for number in numbers]
        if not is_other and not settings.all_episodes:
            hint = "validate on the data that it was trained on, or with --all-episodes, or on other data with --data"
            check_unchanged(checkpoint, saved, digests, hint)
        elif saved is not None and (not is_other or spec.fast_tokens):
            changes.extend(data_differences(saved, digests))

    samples = open_validated_samples(trained, cell.data, spec, check)
    segments = (samples.training_segments if settings.all_episodes else samples.validation_segments)(numbers)
    if not len(segments):
        message = "no episode is held out, which takes two with frames that are drawn"
        raise ConfigurationError(Problem(", ".join(_names(cell.data, numbers)), message, _HINT))
    section = ValidationSection(every=1, batch=settings.batch, max_samples=settings.max_samples)
    one_pass = ValidationPass(section, cell, samples, rank=0, tracker=ProgressTracker(), segments=segments)
    session = build_session(cell, policy, samples.statistics)
    row = one_pass.run(session)
    assert row is not None, "nothing stops it"
    row |= {"evaluated_weights": "averages" if settings.averages else "trained"}
    return {
        "schema_version": SCHEMA_VERSION,
        "checkpoint": {"name": checkpoint.name, "steps": manifest.steps, "cell": trained.to_dict()},
        "data": _names(cell.data, numbers),
        "data_changes": changes,
        "episodes": "all" if settings.all_episodes else "validation",
        "recipe": cell.recipe,
        "device": str(session.device),
        **row,
    }


def open_validated_samples(
    trained: Cell, data: DataSpec, spec: BatchSpec, check: Callable[[MixtureSamples], None] = lambda _: None
) -> MixtureSamples:
    """Open the data of a validation.

    Whatever is validated, FAST tokens are those of the tokenizer that the training had, and a camera is in the slot that its
    name had there. A policy without FAST tokens does not need the datasets of the training: without them, cameras are in the
    slots that a training on the validated data would put them in.

    Args:
        check: called with the samples of the training, if they are opened.

    Raises:
        ConfigurationError: the data do not fit the policy.
        DataError: a dataset is missing or damaged, also one of the training, from which its tokenizer is trained again.
    """
    fast: FastTokenizer | None = None
    cameras: tuple[str, ...] = ()
    is_other = replace(data, workers=trained.data.workers) != trained.data
    if is_other and trained.data.kind != "synthetic":
        try:
            of_training = open_samples(trained.data, spec, trained.seed)
        except (DataError, ConfigurationError):
            if spec.fast_tokens:
                raise
        else:
            assert isinstance(of_training, MixtureSamples)
            check(of_training)
            fast, cameras = of_training.fast, of_training.cameras
    samples = open_samples(data, spec, trained.seed, fast=fast, cameras=cameras)
    assert isinstance(samples, MixtureSamples), "generated data are refused"
    if not is_other:
        check(samples)
    return samples


def _numbers(data: DataSpec, path: Path | None) -> list[int] | None:
    """Return the numbers of the entries of a training's data that are the dataset at a path. None: there is no such entry."""
    if path is None:
        return None
    root = path.resolve()
    return [number for number, dataset in enumerate(data.lerobot_datasets) if Path(dataset.path).resolve() == root] or None


def _names(data: DataSpec, numbers: list[int] | None) -> list[str]:
    """Return the paths of the datasets with these numbers, or of all."""
    paths = [dataset.path for dataset in data.lerobot_datasets] or [data.kind]
    return [paths[number] for number in numbers] if numbers else paths


def _data(trained: Cell, settings: CheckpointValidation, *, is_other: bool) -> DataSpec:
    data = trained.data
    if settings.workers is not None:
        data = replace(data, workers=settings.workers)
    if is_other:
        datasets, path = data.lerobot_datasets, str(settings.data)
        # A single dataset of the training says how cameras are renamed and what actions mean.
        (setting,) = datasets if len(datasets) == 1 else (DatasetSpec(path=path),)
        dataset = replace(setting, path=path, weight=None, source=None, keep=None)
        data = replace(data, kind="lerobot", path=None, datasets=(dataset,))
    if data.kind == "synthetic":
        message = "the training was on generated data, which have no episodes"
        raise ConfigurationError(Problem("--data", message, "name a LeRobot dataset"))
    if settings.all_episodes:
        return replace(data, validation=0.0)
    if not data.validation:
        message = "the training kept no episodes for validation"
        raise ConfigurationError(Problem("data.validation", message, _HINT))
    return data


def _cell_of_one_process(trained: Cell, data: DataSpec) -> Cell:
    return replace(
        trained,
        backend="single",
        world_size=1,
        accumulation=1,
        shard_size=None,
        checkpointing=False,
        compile="off",
        weights=None,  # those of the checkpoint are complete
        optim=replace(trained.optim, ema_decay=None, ema_warmup=False, spike=None),
        data=data,
    )
