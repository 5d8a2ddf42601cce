"""The training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from benchbox.measure.phases import NONE
from benchbox.trainer.stopping import never_stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchbox.measure.phases import Instrument
    from benchbox.registry.contracts import Batch
    from benchbox.session import Session, StepResult
    from benchbox.trainer.checkpoint import CheckpointManager
    from benchbox.trainer.metrics import MetricsLog
    from benchbox.trainer.validation import Validation


class StepAudit(Protocol):
    """Audit of some of the steps of a training. It observes them and changes nothing."""

    def take_step(self, step: int, batches: Iterator[Batch], instruments: Instrument) -> StepResult:
        """Take a step of the session, observed if an audit needs it."""

    def is_due(self, completed: int) -> bool:
        """Return whether an audit has observed all its steps after `completed` steps."""

    def judge(self, completed: int) -> None:
        """Judge the observations of all ranks, which must all call it.

        Raises:
            ThresholdError: the findings end the training.
        """


def train(
    session: Session,
    batches: Iterator[Batch],
    *,
    start: int,
    steps: int,
    metrics: MetricsLog,
    checkpoints: CheckpointManager | None,
    validation: Validation | None = None,
    audit: StepAudit | None = None,
    instruments: Instrument = NONE,
    after_step: Callable[[], None] = lambda: None,
    stopping: Callable[[], bool] = never_stop,
) -> int:
    """Train from step `start` to `steps` (exclusive), log every step, and audit, validate and save at intervals and at the end.

    Args:
        batches: the micro-batches from step `start` on.
        checkpoints: None saves no checkpoints.
        validation: None does not validate.
        audit: None audits nothing.
        after_step: called after every step.
        stopping: called after every step and before every batch of a validation; once it returns True, which it must on all
            ranks at once, the validation is abandoned, a checkpoint without a score is saved, and the training ends.

    Returns:
        the number of completed steps, below `steps` if the training was stopped.

    Raises:
        ConfigurationError: the validation has no such metric as `keep_best` compares. What was trained until then is saved.
        CheckpointError: a checkpoint could not be written.
        NonFiniteError: a loss or gradient norm is not finite. No checkpoint is saved after it.
        ThresholdError: an audit ends the training. No checkpoint is saved after it.
    """
    completed = start
    if validation is not None and start == 0 and validation.is_due(0, last=False):
        with metrics.outside_steps("validation"):
            validation.run(session, 0, stopping)
        validation.check_score()
    for step in range(start, steps):
        result = session.step(batches, instruments) if audit is None else audit.take_step(step, batches, instruments)
        metrics.add(step, result)
        completed = step + 1
        if validation is not None and completed == start + 1:
            validation.check_metric(result.parts)  # not only when the first validation is due
        is_stopping = stopping()
        if audit is not None and audit.is_due(completed):
            with metrics.outside_steps("audit"):  # a training that the audit ends has its rows
                audit.judge(completed)
        score = None
        if validation is not None and not is_stopping and validation.is_due(completed, last=completed == steps):
            with metrics.outside_steps("validation"):
                score = validation.run(session, completed, stopping)
            is_stopping = score is None  # abandoned, or it has not the metric of the score
        if checkpoints is not None and checkpoints.is_due(completed, last=is_stopping or completed == steps):
            with metrics.outside_steps("checkpoint"):  # rows come first: a diverged run must not replace a good checkpoint
                checkpoints.save(session, completed, score=score)
        after_step()
        if is_stopping:
            break
    if checkpoints is not None:
        checkpoints.close()
    metrics.flush()
    if validation is not None:
        validation.check_score()
    return completed
