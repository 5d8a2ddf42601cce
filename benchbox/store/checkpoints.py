"""Checkpoints on disk: folders `step-<n>`, the manifest in each, which of them are kept, and which one is the newest.

A folder has its name only when all its files are on disk, and loses it before the first of them is removed. `latest` is a link
to the newest, replaced in one operation. Whatever a process that is killed leaves behind begins with a dot.
"""

from __future__ import annotations

import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchbox import __version__
from benchbox.errors import ConfigurationError, DataError, Problem, RecordError
from benchbox.store.files import json_text, read_json, write_json
from benchbox.store.table import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from benchbox.spec.cell import Cell

SCHEMA_VERSION = 2
LATEST = "latest"
MANIFEST = "checkpoint.json"
TENSORS, TRAINER = "tensors", "trainer.json"  # what only `benchbox.trainer` writes
REMEDY = "restore it from a copy, or take another checkpoint"  # for a file of a checkpoint that cannot be read
_PREFIX, _PARTIAL, _REMOVED, _DAMAGED = "step-", ".partial-", ".removed-", "damaged-"
_CHUNK_BYTES = 1 << 24
_CHECKSUM = "crc32"  # key of the manifest: the CRC-32 of its other keys
# Fields of a cell that a resumed training may change: who shards, how a step is split over ranks and micro-batches, whether
# activations are recomputed, what is compiled, whether padding is left out, how many processes load. The samples of a step stay
# the same.
_SPLIT = ("batch", "accumulation", "world_size")
_CHANGEABLE = {"backend", "shard_size", "checkpointing", "compile", "padding", "data.workers", *_SPLIT}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """Description of a checkpoint: `checkpoint.json`.

    `topology` is {backend, world_size, mesh}; `files` the size and CRC-32 of every other file by its path in the folder.
    `score` is the value of the metric that `keep_best` compares, lower is better: its negative with `mode: max`. With
    `trainable_only` the frozen weights are not in the checkpoint. `data` has a digest of each dataset, None where they are not
    known, as in checkpoints of earlier versions.
    """

    steps: int
    samples: int
    cell: dict[str, Any]
    config: dict[str, Any] | None
    topology: dict[str, Any]
    recipe: str
    trainable_only: bool
    score: float | None
    files: dict[str, dict[str, int]]
    versions: dict[str, str]
    data: list[dict[str, Any]] | None = None

    def write(self, folder: Path) -> None:
        """Write the manifest into the folder of its checkpoint, atomically."""
        document = {"schema_version": SCHEMA_VERSION, "benchbox_version": __version__, **asdict(self)}
        write_json(folder / MANIFEST, {**document, _CHECKSUM: _document_crc32(document)})


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        RecordError: it is missing or damaged.
        DataError: another version of benchbox wrote a format that this one does not read.
    """
    path = checkpoint / MANIFEST
    values = read_json(path, REMEDY)
    saved = values.pop(_CHECKSUM, None)
    if saved not in (None, _document_crc32(values)):  # checkpoints of earlier versions have none
        raise RecordError(f"{path}: has other contents than were saved; {REMEDY}")
    if (version := values.get("schema_version")) != SCHEMA_VERSION:
        raise DataError(
            f"{checkpoint}: a checkpoint of format {version}, and this benchbox reads {SCHEMA_VERSION}; start the training "
            "anew, or resume it with the benchbox that saved it"
        )
    try:
        return CheckpointManifest(**{name: values[name] for name in CheckpointManifest.__slots__ if name in values})
    except TypeError as error:  # a field is missing
        raise RecordError(f"{path}: not what benchbox writes ({type(error).__name__}: {error})") from None


def checkpoint_name(steps: int) -> str:
    return f"{_PREFIX}{steps:08d}"


def checkpoint_steps(checkpoint: Path) -> int:
    """Return the number of optimizer steps after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(paths, key=checkpoint_steps)


def newest_steps(folder: Path) -> int:
    """Return the steps after which the newest checkpoint in a folder was saved, 0 without one."""
    return max(map(checkpoint_steps, list_checkpoints(folder)), default=0)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path: itself, what a link leads to, or the newest one of a training's folder.

    The newest is the one with the most steps, as for a training that resumes. `latest` may lead to an older one: not every file
    system has links, and a copy of a folder may have another folder in its place.

    Raises:
        DataError: there is none.
    """
    folders = (path, path / "checkpoints")
    newest = (checkpoint for folder in folders for checkpoint in reversed(list_checkpoints(folder)))
    for candidate in (path, *newest, *(folder / LATEST for folder in folders)):
        if (candidate / MANIFEST).is_file():
            return candidate.resolve()  # `latest` may change
    raise DataError(f"{path}: no checkpoint of benchbox train: give a folder step-<n>, or that of a training")


def begin_checkpoint(folder: Path, steps: int) -> Path:
    """Return an empty folder to write a checkpoint into, after removing what interrupted saves have left.

    Raises:
        OSError: the folder cannot be made, or not all of what an interrupted save of these steps has left can be removed.
    """
    partial = partial_folder(folder, steps)
    for prefix in (_PARTIAL, _REMOVED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=path != partial)
    partial.mkdir(parents=True)
    return partial


def partial_folder(folder: Path, steps: int) -> Path:
    return folder / f"{_PARTIAL}{checkpoint_name(steps)}"


def publish_checkpoint(folder: Path, steps: int, warn: Callable[[str], object] = lambda _: None) -> Path:
    """Give a complete checkpoint its name, and let `latest` lead to it. All of it is on disk when this returns.

    Args:
        warn: called with a line if `latest` could not be replaced, or an earlier checkpoint of the same steps not be removed.

    Raises:
        OSError: the checkpoint has not got its name, or that is not on disk.
    """
    partial, final = partial_folder(folder, steps), folder / checkpoint_name(steps)
    for path in [*sorted(partial.rglob("*")), partial]:
        _sync(path)
    if final.exists():  # of an earlier training: `latest` must not lead to it while it is replaced
        _point_latest(folder, [path for path in list_checkpoints(folder) if path != final], warn)
        _delete(_hide(final), warn)
    partial.rename(final)
    _sync(folder)
    _point_latest(folder, list_checkpoints(folder), warn)
    return final


def remove_old_checkpoints(folder: Path, keep: int, best: int = 0, warn: Callable[[str], object] = lambda _: None) -> None:
    """Remove all but the newest `keep` checkpoints and the `best` of lowest score.

    Scores of another metric, validation or data than those of the newest checkpoint are not compared with the others:
    checkpoints that have them stay until there are `best` others. With `best`, those whose score cannot be read stay.

    Args:
        warn: called with a line about each checkpoint that could not be removed.
    """
    paths = list_checkpoints(folder)
    remaining = set(paths[-keep:])
    if best and paths:
        manifests = {path: manifest for path in paths if (manifest := _readable_manifest(path)) is not None}
        scores = {path: manifest.score for path, manifest in manifests.items() if manifest.score is not None}
        newest = manifests.get(paths[-1])
        comparable = sorted(
            (score, path) for path, score in scores.items() if newest is not None and _are_comparable(manifests[path], newest)
        )
        remaining |= {path for _, path in comparable[:best]} if len(comparable) >= best else scores.keys()
        remaining |= set(paths) - manifests.keys()
    for path in paths:
        if path not in remaining:
            try:
                removed = _hide(path)
            except OSError as error:
                warn(f"{path}: an old checkpoint could not be removed ({_reason(error)})")
            else:
                _delete(removed, warn)


def _readable_manifest(checkpoint: Path) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint, None if it is damaged or of another format: that must end no training."""
    try:
        return read_manifest(checkpoint)
    except (RecordError, DataError):
        return None


def _are_comparable(one: CheckpointManifest, other: CheckpointManifest) -> bool:
    """Return whether the scores of two checkpoints are of the same metric and, as far as both state it, of the same data."""
    return _what_is_compared(one) == _what_is_compared(other) and (None in (one.data, other.data) or one.data == other.data)


def _what_is_compared(manifest: CheckpointManifest) -> tuple[Any, ...]:
    """Return what the score of a checkpoint is: these settings may change when a training is resumed."""
    config = manifest.config or {}
    best, validation = (config.get("checkpoint") or {}).get("keep_best") or {}, config.get("validation") or {}
    return best.get("metric"), best.get("mode"), validation.get("weights"), validation.get("max_samples")


def describe_files(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Return size and CRC-32 of files by their path in a folder."""
    return {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in paths}


def damage_of(checkpoint: Path, *, contents: bool = True) -> str | None:
    """Return what is wrong with the files of a checkpoint, None if they are those that were saved.

    Args:
        contents: whether the contents are read and compared, and not the sizes only.

    Raises:
        DataError: another version of benchbox wrote it.
    """
    try:
        files = read_manifest(checkpoint).files
    except RecordError as error:
        return str(error)
    for name, saved in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != saved["bytes"]:
            return f"{name} has {size} bytes, and {saved['bytes']} were saved"
    if contents:
        with ThreadPoolExecutor() as pool:  # checksums release the interpreter
            for (name, saved), checksum in zip(
                files.items(), pool.map(_crc32, [checkpoint / name for name in files]), strict=True
            ):
                if checksum != saved["crc32"]:
                    return f"{name} has other contents than were saved"
    return None


def set_damaged_aside(folder: Path) -> list[str]:
    """Rename damaged checkpoints that are newer than every intact one, so that a training resumes from the newest intact one.

    Returns:
        A line about each of them.

    Raises:
        DataError: all are damaged; none has been renamed.
    """
    paths, damaged = list_checkpoints(folder), {}
    while paths and (damage := damage_of(paths[-1])) is not None:
        damaged[paths.pop()] = damage
    if damaged and not paths:
        path, damage = next(iter(damaged.items()))
        raise DataError(
            f"{path}: damaged checkpoint ({damage}), and there is no intact one; --out names a folder for a new training"
        )
    lines: list[str] = []
    if damaged:
        _point_latest(folder, paths, lines.append)
    for path, damage in damaged.items():
        aside = path.with_name(f"{_DAMAGED}{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        lines.append(f"{path}: damaged checkpoint ({damage}); renamed to {aside.name}, and {paths[-1].name} is used")
    return lines


def configuration_changes(checkpoint: Path, cell: Cell) -> list[str]:
    """Return what a training resumed from a checkpoint changes, of what it may change, as `field is a there and b here`.

    Raises:
        ConfigurationError: the checkpoint is of another configuration, naming what differs.
        RecordError: the checkpoint has no valid manifest.
    """
    manifest = read_manifest(checkpoint)
    try:
        saved = cell.from_dict(manifest.cell)  # an older one lacks fields that came later
    except (KeyError, TypeError) as error:
        raise RecordError(f"{checkpoint / MANIFEST}: not what benchbox writes ({type(error).__name__}: {error})") from None
    there, here = _comparable(saved), _comparable(cell)
    if len(saved.data.lerobot_datasets) != len(cell.data.lerobot_datasets):
        there["data"], here["data"] = (f"{len(spec.data.lerobot_datasets)} dataset(s)" for spec in (saved, cell))
    different = sorted(key for key in here if here[key] != there[key])
    refused = [key for key in different if key not in _CHANGEABLE]
    message = ""
    if saved.samples_per_step != cell.samples_per_step:
        refused += [key for key in different if key in _SPLIT]
        message = f" ({saved.samples_per_step} samples per step there and {cell.samples_per_step} here)"
    if refused:
        raise ConfigurationError(
            Problem(
                str(checkpoint),
                f"another configuration: {_changes(refused, there, here)}{message}",
                "resume with what it was trained with",
            )
        )
    return [_changes([key], there, here) for key in different]


def describe_resume(checkpoint: Path, cell: Cell) -> str:
    """Return a line about resuming from a checkpoint: where the training continues, and what changes."""
    manifest, changes = read_manifest(checkpoint), configuration_changes(checkpoint, cell)
    line = f"resuming after step {manifest.steps} ({manifest.samples} samples)"
    return f"{line}; changed: {', '.join(changes)}" if changes else line


def _changes(keys: Collection[str], there: Mapping[str, str], here: Mapping[str, str]) -> str:
    return ", ".join(f"{key} is {there[key]} there and {here[key]} here" for key in keys)


def _comparable(cell: Cell) -> dict[str, str]:
    """Return the fields of a cell as text, those of its data and optimizer by dotted keys; datasets in `data`.

    Every cell has the same keys: the guard against spikes, which may be absent, is one of them.
    """
    values = cell.to_dict()
    fields = {key: value for key, value in flatten(values).items() if not key.startswith("optim.spike")}
    for key in ("data.path", "data.datasets"):
        del fields[key]
    whole = {"data": [dataset.to_dict() for dataset in cell.data.lerobot_datasets], "optim.spike": values["optim"]["spike"]}
    return {key: repr(value) for key, value in (fields | whole).items()}


def _point_latest(folder: Path, checkpoints: list[Path], warn: Callable[[str], object]) -> None:
    """Let `latest` lead to the newest of the checkpoints, on disk too; remove it without any. A failure is a warning."""
    link = folder / LATEST
    try:
        if checkpoints:
            temporary = folder / f".{LATEST}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(checkpoints[-1].name)
            temporary.replace(link)
        else:
            link.unlink(missing_ok=True)
        _sync(folder)
    except OSError as error:
        newest = checkpoints[-1].name if checkpoints else "nothing"
        warn(f"{link}: the link could not be replaced ({_reason(error)}); the newest checkpoint is {newest}")


def _hide(checkpoint: Path) -> Path:
    """Take the name from a checkpoint that is to be removed, so that no half of it is ever taken for a checkpoint."""
    removed = checkpoint.with_name(f"{_REMOVED}{checkpoint.name}")
    shutil.rmtree(removed, ignore_errors=True)
    checkpoint.rename(removed)
    return removed


def _delete(removed: Path, warn: Callable[[str], object]) -> None:
    """Remove what `_hide` has returned. A failure is a warning."""
    try:
        shutil.rmtree(removed)
    except OSError as error:
        warn(f"{removed}: not all files of an old checkpoint could be removed ({_reason(error)}); the next save tries again")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _document_crc32(document: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a JSON object, however its text is indented."""
    return zlib.crc32(json_text(document).encode())


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _sync(path: Path) -> None:
    """Flush a file or folder to disk: a rename may otherwise reach the disk before the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
