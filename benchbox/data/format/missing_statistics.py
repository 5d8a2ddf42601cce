"""Statistics that a dataset does not have stored, computed over all its frames and cached.

They are kept in `meta/benchbox_statistics.json` of the dataset, or in a cache folder of the user where that cannot be written.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.format import statistics
from benchbox.data.format.metadata import ACTION, STATE, Statistics, find_data_files
from benchbox.data.format.tables import TableCache, read_column
from benchbox.store.files import write_json
from benchbox.store.machine_cache import user_cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchbox.data.format.metadata import DatasetMetadata

FILE = "meta/benchbox_statistics.json"
FEATURES = (STATE, ACTION)  # those that policies normalise


def has_all_statistics(metadata: DatasetMetadata) -> bool:
    """Return whether state and action have the statistics of every mode of normalisation."""
    required = {"mean", "std", "min", "max", *statistics.QUANTILES}
    return all(required <= set(metadata.statistics.get(name, {})) for name in FEATURES)


def complete_statistics(
    metadata: DatasetMetadata, on_progress: Callable[[int, int], None], *, cache: bool
) -> tuple[Statistics, Path | None]:
    """Return the statistics of a dataset with those of state and action that it lacks, and the file these are cached in.

    Stored statistics are left as they are; the file is None if none is missing, or `cache` is false and there is none yet.
    `on_progress` is called with the number of data files read and their number.

    Raises:
        DataError: a data file is missing or damaged.
    """
    if has_all_statistics(metadata):
        return metadata.statistics, None
    fingerprint = _fingerprint(metadata)
    candidates = _cache_files(metadata.root)
    for path in candidates:
        if (cached := _read(path, fingerprint)) is not None:
            return _merge(metadata.statistics, cached), path
    computed = _compute(metadata, on_progress)
    written = _write(candidates, {"fingerprint": fingerprint, "statistics": computed}) if cache else None
    return _merge(metadata.statistics, computed), written


def _merge(stored: Statistics, computed: Statistics) -> Statistics:
    """Return the stored statistics with those that they lack. What is damaged stays, and is reported when it is used."""
    completed = {
        name: lacking | present for name, lacking in computed.items() if isinstance(present := stored.get(name, {}), dict)
    }
    return stored | completed


def _compute(metadata: DatasetMetadata, on_progress: Callable[[int, int], None]) -> Statistics:
    tables = TableCache(metadata)
    files = list(dict.fromkeys(tables.locate(episode)[0] for episode in metadata.episodes))
    columns: dict[str, list[np.ndarray]] = {name: [] for name in FEATURES}
    for number, path in enumerate(files, 1):
        for name in FEATURES:
            columns[name].append(read_column(path, name, metadata.features[name]))
        on_progress(number, len(files))
    return {name: statistics.feature_statistics(np.concatenate(values)) for name, values in columns.items()}


def _cache_files(root: Path) -> tuple[Path, Path]:
    """Return where the statistics may be cached, in the order of preference."""
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    return root / FILE, user_cache() / "statistics" / f"{name}.json"


def _fingerprint(metadata: DatasetMetadata) -> str:
    """Return a digest of the names, sizes and times of the data files, without opening them."""
    lines = []
    listed = dict.fromkeys(episode.data_file for episode in metadata.episodes)
    unlisted = find_data_files(metadata.root) if metadata.shares_files else []  # see `TableCache.locate`
    for path in listed | dict.fromkeys(unlisted):
        if path.exists():
            status = path.stat()
            lines.append(f"{path.relative_to(metadata.root)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read(path: Path, fingerprint: str) -> Statistics | None:
    """Return the cached statistics; None if there are none, or they are of other files."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cached: Statistics = content["statistics"]
        return cached if content["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(paths: tuple[Path, ...], content: dict[str, object]) -> Path | None:
    """Write the first file that can be written, and return it."""
    for path in paths:
        try:
            write_json(path, content)
        except OSError:
            continue
        return path
    return None
