"""Weights & Biases: one run for each training, offline in the folder `wandb` unless there is a key."""

from __future__ import annotations

import netrc
import os
from typing import TYPE_CHECKING, Any

import wandb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.trainer.trackers.tracker import TrackedTraining

_PROJECT = "benchbox"


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
        wandb.teardown()  # ends its service process, which would outlive this rank


def open_wandb(training: TrackedTraining) -> WandbTracker:
    """Start a run, or continue that of the same folder. Variables of wandb such as WANDB_MODE and WANDB_PROJECT are obeyed."""
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=training.name,
        dir=str(training.folder),
        id=training.run_id("wandb"),
        resume="allow",
        mode=_mode(),
        config=dict(training.config),
        settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
    )
    return WandbTracker(run)


def _mode() -> Any:
    """Return WANDB_MODE, else online where a key is stored, and offline elsewhere: nothing asks for a key."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        entries = netrc.netrc()
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return "online" if entries.authenticators("api.wandb.ai") else "offline"
