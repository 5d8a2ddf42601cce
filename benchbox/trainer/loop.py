"""The training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.measure.phases import NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchbox.measure.phases import Instrument
    from benchbox.registry.contracts import Batch
    from benchbox.session import Session
    from benchbox.trainer.checkpoint import CheckpointManager
    from benchbox.trainer.metrics import MetricsLog


def train(
    session: Session,
    batches: Iterator[Batch],
    *,
    start: int,
    steps: int,
    metrics: MetricsLog,
    checkpoints: CheckpointManager | None,
    instruments: Instrument = NONE,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train from step `start` to `steps` (exclusive), log every step, and save checkpoints at intervals and at the end.

    Args:
        batches: the micro-batches from step `start` on.
        checkpoints: None saves no checkpoints.
        after_step: called after every step.

    Raises:
        NonFiniteError: a loss or gradient norm is not finite. No checkpoint is saved after it.
    """
    for step in range(start, steps):
        metrics.add(step, session.step(batches, instruments))
        completed = step + 1
        if checkpoints is not None and (completed % checkpoints.interval == 0 or completed == steps):
            metrics.flush()  # before the checkpoint: a diverged run must not replace a good checkpoint
            checkpoints.save(session, completed)
        after_step()
    metrics.flush()
