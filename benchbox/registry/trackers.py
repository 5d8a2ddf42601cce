"""Trackers: programs that show the metrics of trainings. Listed without importing them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class TrackerInfo:
    """A tracker by its name in training files.

    Args:
        package: the module that it imports.
        target: `module:function` that opens a `Tracker` for a `TrackedTraining` (`benchbox.trainer.trackers.tracker`).
    """

    name: str
    package: str
    target: str

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None


TRACKERS = {
    info.name: info
    for info in (
        TrackerInfo("tensorboard", "tensorboard", "benchbox.trainer.trackers.tensorboard:open_tensorboard"),
        TrackerInfo("wandb", "wandb", "benchbox.trainer.trackers.wandb:open_wandb"),
        TrackerInfo("trackio", "trackio", "benchbox.trainer.trackers.trackio:open_trackio"),
    )
}
INSTALL = "pip install 'benchbox[track]'"
