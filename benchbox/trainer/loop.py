"""The training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.measure.phases import NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchbox.measure.phases import Instrument
    from benchbox.registry.contracts import Batch
    from benchbox.session import Session
    from benchbox.trainer.checkpoint import Checkpoints
    from benchbox.trainer.metrics import MetricsLog


def train(
    session: Session,
    batches: Iterator[Batch],
    *,
    start: int,
    steps: int,
    metrics: MetricsLog,
    checkpoints: Checkpoints | None,
    instruments: Instrument = NONE,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Take steps `start` to `steps` (exclusive), log each, checkpoint now and then and at the end.

    Args:
        batches: a stream that stands at step `start`.
        checkpoints: None trains without.

    Raises:
        NonFiniteError: a loss or gradient norm is not finite; nothing is checkpointed after it.
    """
    for step in range(start, steps):
        metrics.add(step, session.step(batches, instruments))
        done = step + 1
        if checkpoints is not None and (done % checkpoints.every == 0 or done == steps):
            metrics.flush()  # before the checkpoint: a diverged run must not overwrite a healthy one
            checkpoints.save(session, done)
        after_step()
    metrics.flush()
