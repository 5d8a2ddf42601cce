"""Features of a dataset that is written: validation, and their description in `meta/info.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.data.video.files import CODEC_NAME, PIXEL_FORMAT
from benchbox.data.writing.files import ARROW_TYPES
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_FEATURES = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}
"""Columns that the writer fills in every dataset."""


def validate_feature(name: str, feature: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtype, shape and names of a feature.

    Raises:
        DataError: the writer fills this column itself, or cannot store its dtype or shape.
    """
    if name in DEFAULT_FEATURES:
        raise DataError(f"{name}: the writer fills this column itself")
    dtype, shape = feature["dtype"], list(feature["shape"])
    if dtype == "video":
        if len(shape) != 3 or shape[2] != 3 or shape[0] % 2 or shape[1] % 2:
            raise DataError(f"{name}: a video is (height, width, 3) with even sizes, not {tuple(shape)}")
    elif dtype not in ARROW_TYPES or len(shape) != 1:
        raise DataError(
            f"{name}: cannot store {dtype} of shape {tuple(shape)}; dtypes are {', '.join(ARROW_TYPES)}, in one dimension"
        )
    return {"dtype": dtype, "shape": shape, "names": feature.get("names")}


def describe_feature(feature: Mapping[str, Any], fps: int) -> dict[str, Any]:
    """Return the entry of a feature in `meta/info.json`."""
    if feature["dtype"] != "video":
        return dict(feature)
    height, width, channels = feature["shape"]
    return {
        **feature,
        "info": {
            "video.height": height,
            "video.width": width,
            "video.channels": channels,
            "video.codec": CODEC_NAME,
            "video.pix_fmt": PIXEL_FORMAT,
            "video.fps": fps,
            "video.is_depth_map": False,
            "has_audio": False,
        },
    }
