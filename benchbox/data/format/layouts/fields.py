"""Checks of single fields of the metadata, so that a damaged one is named with its file and row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from benchbox.data.format.metadata import ACTION, STATE
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchbox.data.format.metadata import Statistics

_MAX_FPS = 10_000
_REQUIRED = (STATE, ACTION, "index", "episode_index", "frame_index", "task_index", "timestamp")


def whole_number(row: Mapping[str, Any], name: str, where: str) -> int:
    """Return a field that is a whole number from 0 on.

    Raises:
        DataError: it is missing or something else.
    """
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise DataError(f"{where}: {name} is {value!r:.60}, and a whole number from 0 on is expected; restore the file")
    return value


def seconds(row: Mapping[str, Any], name: str, where: str) -> float:
    """Return a field that is a time in seconds.

    Raises:
        DataError: it is missing or something else.
    """
    value = row.get(name)
    if not isinstance(value, float | int) or not 0 <= value < math.inf:
        raise DataError(f"{where}: {name} is {value!r:.60}, and a time in seconds is expected; restore the file")
    return float(value)


def text(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that is a text.

    Raises:
        DataError: it is missing or something else.
    """
    value = row.get(name)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {value!r:.60}, and a text is expected; restore the file")
    return value


def texts(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """Return a field that is a list of texts.

    Raises:
        DataError: it is missing or something else.
    """
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{where}: {name} is {value!r:.60}, and a list of texts is expected; restore the file")
    return tuple(value)


def file_path(info: Mapping[str, Any], template: str, names: Mapping[str, Any], root: Path) -> Path:
    """Return the path of a file by a template of `meta/info.json`, `data_path` or `video_path`.

    Raises:
        DataError: the template is missing, or names fields that there are not.
    """
    where = str(root / "meta/info.json")
    value = text(info, template, where)
    try:
        return root / value.format(**names)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        fields = ", ".join(f"{{{name}}}" for name in names)
        raise DataError(f"{where}: {template} is {value!r:.100}, and a path with the fields {fields} is expected") from None


def check_info(info: Mapping[str, Any], where: Path) -> None:
    """Check the features and the rate of `meta/info.json`.

    Raises:
        DataError: one of them is missing or of another type than it must be.
    """
    rate = info.get("fps")
    if not isinstance(rate, float | int) or isinstance(rate, bool) or not 0 < rate < _MAX_FPS:
        raise DataError(f"{where}: fps is {rate!r:.60}, and a positive number of frames per second is expected")
    features = info.get("features")
    if not isinstance(features, dict):
        raise DataError(f"{where}: features are {features!r:.60}, and an object by name is expected; restore the file")
    for name in _REQUIRED:
        if name not in features:
            raise DataError(f"{where}: the dataset has no feature {name!r}; restore the file, or record it")
    for name, feature in features.items():
        if not isinstance(feature, dict):
            raise DataError(f"{where}: feature {name!r} is {feature!r:.60}, and an object with dtype and shape is expected")
        text(feature, "dtype", f"{where}: feature {name!r}")
        shape = feature.get("shape")
        is_shape = isinstance(shape, list) and all(type(size) is int and 0 < size < 2**31 for size in shape)
        if not is_shape:
            raise DataError(f"{where}: feature {name!r}: shape is {shape!r:.60}, and a list of positive sizes is expected")


def checked_statistics(stats: Any, where: str) -> Statistics:
    """Return the statistics of an episode by feature, all of whose values are numbers.

    Raises:
        DataError: they are something else.
    """
    if not isinstance(stats, dict):
        raise DataError(f"{where}: statistics are {stats!r:.60}, and an object by feature is expected; {_WITHOUT_STATISTICS}")
    for name, values in stats.items():
        if not isinstance(values, dict):
            raise DataError(
                f"{where}: statistics of {name} are {values!r:.60}, and an object is expected; {_WITHOUT_STATISTICS}"
            )
        for statistic, value in values.items():
            try:
                array = np.asarray(value)
                is_numeric = array.dtype.kind in "biuf" and array.size > 0
            except ValueError:  # lists of several lengths
                is_numeric = False
            if not is_numeric or not isinstance(value, list):
                raise DataError(
                    f"{where}: {statistic} of {name} is {value!r:.60}, and a list of numbers is expected; {_WITHOUT_STATISTICS}"
                )
    return stats


_WITHOUT_STATISTICS = "without its statistics an episode is read too"
