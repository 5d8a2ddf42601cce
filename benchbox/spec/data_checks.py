"""Checks of the data that a file names, before any rank is started: datasets, cameras, ranges of frames, tokenizers.

They read the plain values and skip those of a wrong type, which pydantic reports, so that all problems of a file come at once.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.errors import Problem
from benchbox.registry.bundled import sample_path
from benchbox.registry.names import did_you_mean
from benchbox.registry.recordings import find_unfinished
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec, is_camera

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.spec.source import Keys, Source

_OF_A_DATASET = ("rename", "control_mode", "source", "keep")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
IMAGES = "observation.images."  # prefix of the features that are cameras


def check_data(source: Source) -> list[Problem]:
    """Return the problems of the data that a file names. Paths are relative to the working directory."""
    data = source.values.get("data")
    if not isinstance(data, dict):
        return []
    return [*_check_keys(data, source), *_check_datasets(data, source), *_check_tokenizer(data, source)]


def _check_keys(data: dict[str, Any], source: Source) -> Iterator[Problem]:
    if "mixture" in data:
        if "lerobot" in data:
            where, hint = source.where(("data", "lerobot"), key=True), "name it in the mixture"
            yield Problem(where, "data has a mixture, and a dataset beside it", hint)
        for key in _OF_A_DATASET:
            if key in data:
                where, hint = source.where(("data", key), key=True), "give it with a dataset of the mixture"
                yield Problem(where, f"{key} is of one dataset, and data has a mixture", hint)
        yield from _check_weights(data["mixture"], source)
    elif "lerobot" not in data:
        for key in _OF_A_DATASET:
            if key in data:
                where = source.where(("data", key), key=True)
                yield Problem(where, f"{key} is of a dataset, and data names none", "add lerobot: PATH")


def _check_weights(mixture: Any, source: Source) -> Iterator[Problem]:
    entries = mixture if isinstance(mixture, list) else []
    has_weight = [isinstance(entry, dict) and "weight" in entry for entry in entries]
    if not any(has_weight):
        return
    first = has_weight.index(True)
    for number, entry in enumerate(entries):
        if isinstance(entry, dict) and "weight" not in entry:
            message = f"data.mixture[{number}] has no weight, and data.mixture[{first}] has one"
            yield Problem(source.where(("data", "mixture", number)), message, "give all datasets a weight, or none")


def _check_datasets(data: dict[str, Any], source: Source) -> Iterator[Problem]:
    mixture = data.get("mixture")
    entries: list[tuple[Keys, Any]] = [(("data",), data)]
    if isinstance(mixture, list):
        entries += [(("data", "mixture", number), entry) for number, entry in enumerate(mixture)]
    for keys, entry in entries:
        if isinstance(entry, dict):
            yield from _check_dataset(entry, keys, source)


def _check_dataset(entry: dict[str, Any], keys: Keys, source: Source) -> Iterator[Problem]:
    path, keep, rename = entry.get("lerobot"), entry.get("keep"), entry.get("rename")
    if path and isinstance(path, str):
        if not (Path(path) / "meta" / "info.json").is_file():
            missing = "there is no meta/info.json in it" if Path(path).is_dir() else "there is no such folder"
            hint = None
            if find_unfinished(Path(path)):
                hint = f"its recording is not finished: {shlex.join(['benchbox', 'data', 'inspect', path])} says how to"
            elif _HUB_ID.fullmatch(path) and not Path(path).exists():
                hint = "datasets are read from local folders and not downloaded; name the folder of a copy"
            yield Problem(source.where((*keys, "lerobot")), f"{path} is not a LeRobot dataset: {missing}", hint)
        elif isinstance(rename, dict):
            yield from _check_cameras(path, rename, (*keys, "rename"), source)
    if keep and isinstance(keep, str) and not Path(keep).is_file():
        hint = "name a JSON or Parquet file with ranges of frames"
        yield Problem(source.where((*keys, "keep")), f"there is no file {keep}", hint)


def _check_cameras(path: str, rename: dict[str, Any], keys: Keys, source: Source) -> Iterator[Problem]:
    cameras = _read_cameras(Path(path))
    if cameras is None:  # a damaged dataset, which opening it reports
        return
    for camera in rename:
        if camera not in cameras:
            hint = did_you_mean(camera, cameras) if cameras else "it has none"
            yield Problem(source.where((*keys, camera), key=True), f"{path} has no camera {camera!r}", hint)
    names = Counter(str(rename.get(camera, camera)) for camera in cameras)
    for camera, name in rename.items():
        if isinstance(name, str) and names[name] > 1:
            same = [other for other in cameras if other != camera and rename.get(other, other) == name]
            message = f"{path} has two cameras with the name {name!r}: {', '.join([camera, *same])}"
            yield Problem(source.where((*keys, camera)), message, "give each a name of its own")


def _read_cameras(root: Path) -> list[str] | None:
    """Return the cameras that a dataset lists; None if its description cannot be read."""
    try:
        features = json.loads((root / "meta" / "info.json").read_text(encoding="utf-8"))["features"]
        return [name.removeprefix(IMAGES) for name, feature in features.items() if is_camera(feature)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def camera_slots(data: DataSpec) -> int | None:
    """Return the number of cameras of the datasets, those of one name counted once; None if it is not known, or any number."""
    if data.kind == "synthetic":
        return None
    names: set[str] = set()
    for dataset in data.lerobot_datasets or (DatasetSpec(path=str(sample_path())),):
        cameras = _read_cameras(Path(dataset.path))
        if cameras is None:
            return None
        names |= {dict(dataset.rename).get(camera, camera) for camera in cameras}
    return len(names)


def _check_tokenizer(data: dict[str, Any], source: Source) -> Iterator[Problem]:
    tokenizer = data.get("tokenizer")
    if not tokenizer or not isinstance(tokenizer, str):
        return
    file = DataSpec(tokenizer=tokenizer).tokenizer_file
    if file is not None and not file.is_file():
        missing = "there is no tokenizer.json in it" if Path(tokenizer).is_dir() else "there is no such file"
        hint = "name a tokenizer.json or its folder"
        yield Problem(source.where(("data", "tokenizer")), f"{tokenizer} is not a tokenizer: {missing}", hint)
