"""The datasets of a cell: how a matrix or training file names them, and what it says about each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchbox.spec.stored_fields import known_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

UNKNOWN = "unknown"


def is_camera(feature: Mapping[str, Any]) -> bool:
    """Return whether a feature of a LeRobot dataset is a camera: a video or image in colours, and not a depth map."""
    descriptions = [feature[key] for key in ("info", "video_info") if isinstance(feature.get(key), dict)]
    is_depth = any(info.get("is_depth_map") or info.get("video.is_depth_map") for info in descriptions)
    return feature["dtype"] in ("video", "image") and not is_depth


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """A LeRobot dataset, and how its frames are used."""

    path: str
    weight: float | None = None  # share of drawn samples, relative to the other datasets; None: each frame once per epoch
    rename: tuple[tuple[str, str], ...] = ()  # cameras: the name in the dataset, and the name in the mixture
    control_mode: str = UNKNOWN  # what actions mean: joint positions, end-effector poses, ...
    source: str | None = None  # where the frames come from; None: the name of the folder
    keep: str | None = None  # file with the ranges of frames that are drawn

    @property
    def source_name(self) -> str:
        """The source, by default the name of the dataset's folder."""
        return self.source or Path(self.path).resolve().name

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "path": self.path,
            "weight": self.weight,
            "rename": dict(self.rename),
            "control_mode": self.control_mode,
            "source": self.source,
            "keep": self.keep,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the specification of `to_dict`; fields that are missing have their default."""
        return cls(**{**known_fields(cls, values), "rename": tuple(dict(values.get("rename", {})).items())})
