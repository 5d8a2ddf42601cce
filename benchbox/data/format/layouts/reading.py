"""Reading the metadata of a LeRobot dataset, whatever its version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.data.format.layouts import v2, v30
from benchbox.data.format.layouts.fields import check_info
from benchbox.data.format.metadata import DatasetMetadata, read_json_object
from benchbox.data.format.unfinished import how_to_finish
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

_READERS = {v2.V20: v2.read, v2.V21: v2.read, v30.VERSION: v30.read}


def read_metadata(root: Path) -> DatasetMetadata:
    """Read all files in `meta/`. No data or video file is opened.

    Raises:
        DataError: it is not a LeRobot dataset, has an unsupported version, or a file is damaged.
    """
    if not (root / "meta/info.json").exists() and (remedy := how_to_finish(root)):
        raise DataError(f"{root}: {remedy}")
    if not root.is_dir():
        raise DataError(f"{root}: no such dataset folder")
    info = read_json_object(root / "meta/info.json", missing="not a LeRobot dataset: meta/info.json is missing")
    version = info.get("codebase_version")
    if not isinstance(version, str) or version not in _READERS:
        raise DataError(
            f"{root / 'meta/info.json'}: codebase_version is {version!r}, and {', '.join(_READERS)} can be read; "
            "convert the dataset with lerobot's own conversion script"
        )
    check_info(info, root / "meta/info.json")
    try:
        metadata = _READERS[version](root, info)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{root / 'meta'}: damaged metadata ({type(error).__name__}: {error}); restore the folder") from error
    expected, episodes_file = 0, root / ("meta/episodes" if version == v30.VERSION else "meta/episodes.jsonl")
    for episode in metadata.episodes:
        if episode.from_index != expected or episode.length < 1:
            problem = "does not follow the one before it" if episode.from_index != expected else "has no frames"
            raise DataError(f"{episodes_file}: episode {episode.index} {problem}")
        expected = episode.to_index
    if info.get("total_frames") != expected:
        raise DataError(
            f"{root / 'meta/info.json'}: total_frames is {info.get('total_frames')}, and the episodes hold {expected}"
        )
    return metadata
