"""trackio: one run for each training, in trackio's local database."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import trackio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.trainer.trackers.tracker import TrackedTraining

_PROJECT = "benchbox"


class TrackioTracker:
    """A run of trackio."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackio(training: TrackedTraining) -> TrackioTracker:
    """Start a run, or continue that of the same folder. TRACKIO_DIR and TRACKIO_PROJECT are obeyed."""
    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
        name=f"{training.name}-{training.run_id('trackio')}",  # by which a run is found again
        config=dict(training.config),
        resume="allow" if training.start else "never",
        embed=False,
    )
    return TrackioTracker(run)
