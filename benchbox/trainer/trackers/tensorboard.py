"""TensorBoard: event files in the folder `tensorboard` of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.trainer.trackers.tracker import TrackedTraining


class TensorBoardTracker:
    """Writer of one scalar for each value."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def open_tensorboard(training: TrackedTraining) -> TensorBoardTracker:
    """Open the event files. Steps that a resumed training repeats replace those of the earlier run."""
    return TensorBoardTracker(SummaryWriter(training.folder / "tensorboard", purge_step=training.start))
