"""Validation: the loss of the episodes that are not trained on, in one pass over all datasets."""

from __future__ import annotations

import math
import time
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

from benchbox.data.loading.loader import load_samples
from benchbox.data.order.validation import validation_batches
from benchbox.data.samples.mixture import MixtureSamples
from benchbox.errors import ConfigurationError, NonFiniteError, Problem
from benchbox.registry.names import did_you_mean
from benchbox.spec.train import BestSection
from benchbox.store.files import json_text, keep_rows
from benchbox.trainer.evaluation import evaluating
from benchbox.trainer.sample_table import SampleTable, gather
from benchbox.trainer.stopping import never_stop
from benchbox.trainer.trackers.fan_out import Trackers
from benchbox.trainer.validation_sums import ValidationSums

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    import numpy as np

    from benchbox.measure.phases import ProgressTracker
    from benchbox.session import Session
    from benchbox.spec.cell import Cell
    from benchbox.spec.validation_section import ValidationSection


class ValidationPass:
    """One pass over the validation frames of a cell's data, which sessions of the cell take.

    Every sample is computed once over all ranks, in a fixed order and with noise of its own, the same in every pass. Training
    does not notice: gradients, weights, modes, generators and loader processes are left as they are.

    Args:
        samples: of the training, on every rank; their validation frames are read.
        tracker: shows the progress.
        segments: frames (n, 2) to read in place of the validation frames, see `validation_batches`.

    Raises:
        ConfigurationError: no dataset has a validation episode.
    """

    def __init__(
        self,
        section: ValidationSection,
        cell: Cell,
        samples: object,
        *,
        rank: int,
        tracker: ProgressTracker,
        segments: np.ndarray | None = None,
    ) -> None:
        assert isinstance(samples, MixtureSamples), "a training file without episodes does not validate"
        segments = samples.validation_segments() if segments is None else segments
        if not len(segments):
            hint = "a dataset needs two episodes with frames that are drawn; leave out validation.every, or add data"
            raise ConfigurationError(Problem("validation.every", "no dataset has a validation episode", hint))
        self._cell, self._samples, self._rank, self._tracker = cell, samples, rank, tracker
        self._weights = section.weights
        self._largest = section.batch or cell.batch
        self._batches = validation_batches(
            segments, batch=self._largest, rank=rank, world_size=cell.world_size, max_samples=section.max_samples
        )

    def run(self, session: Session, stopping: Callable[[], bool] = never_stop) -> dict[str, Any] | None:
        """Return loss, terms and groups, the same on all ranks, which must all call it. See `ValidationSums.summary`.

        Args:
            stopping: called before every batch; once it returns True, which it must on all ranks at once, the pass is abandoned
                and None is returned.

        Raises:
            DataError: a sample could not be read.
            UnsupportedError: the averages of the weights are to be validated, and the session keeps none.
        """
        begin = time.perf_counter()
        averages = self._weights == "averages"
        with session.averaged_weights() if averages else nullcontext(), evaluating(session, self._cell.seed + self._rank):
            sums = self._sum_batches(session, stopping)
        if sums is None:
            return None
        seconds = time.perf_counter() - begin
        row = {
            "seconds": seconds,
            "evaluated_weights": self._weights,
            **sums.summary(self._samples.provenance, self._samples.shares),
        }
        if not row["per_sample"]:
            row["reason"] = f"{self._cell.policy} returns no losses per sample: means are over all samples, without groups"
        return row

    def _sum_batches(self, session: Session, stopping: Callable[[], bool]) -> ValidationSums | None:
        phase = self._tracker.phase
        sums: ValidationSums | None = None
        keys = [list(batch.keys) for batch in self._batches]
        with (
            closing(load_samples(self._samples, keys, self._cell.data.workers)) as loaded,
            self._tracker.within("validate", len(keys)),
        ):
            for planned in self._batches:
                if stopping():
                    return None
                with self._tracker.step():
                    with phase("data_wait"):
                        batch = next(loaded).unpack()
                    with phase("forward"):
                        losses = session.evaluate(batch)
                    with phase("sync"):
                        if sums is None:
                            layout = SampleTable.of(losses, self._largest)
                            sums = ValidationSums(layout)
                        sums.add(*layout.unpack(gather(layout.pack(losses, batch, counts=planned.counts))))
        assert sums is not None
        return sums


class Validation:
    """Validates a training at intervals, appends a row to `validation.jsonl`, and scores checkpoints.

    Args:
        start: first step of this run. Rows of an interrupted run for later steps are removed, because these are repeated.
        best: the metric of the score.
    """

    def __init__(
        self,
        section: ValidationSection,
        one_pass: ValidationPass,
        *,
        path: Path,
        start: int,
        is_writer: bool,
        best: BestSection | None = None,
    ) -> None:
        self._section, self._pass, self._path, self._is_writer = section, one_pass, path, is_writer
        self._best = best or BestSection()
        self._unscored: ConfigurationError | None = None
        self.completed: int | None = None  # steps before the newest validation that was not abandoned
        self.trackers = Trackers()  # get the loss, its terms and its parts, on the rank that writes
        if is_writer and path.exists():
            keep_rows(path, lambda step: start > 0 and step <= start)  # one that begins again validates again

    def is_due(self, completed: int, *, last: bool) -> bool:
        """Return whether to validate after `completed` steps: at intervals, after the last step, at the start on request."""
        return last or (completed % self._section.every == 0 if completed else self._section.at_start)

    def check_metric(self, parts: Collection[str]) -> None:
        """Check the metric of the score against the parts of the loss of a step, which are those of every step.

        Raises:
            ConfigurationError: it is none of them.
        """
        names = ["loss", *parts]
        if (metric := self._best.metric) not in names:
            where, message = "checkpoint.keep_best.metric", f"the validation has no metric {metric!r}"
            raise ConfigurationError(Problem(where, message, did_you_mean(metric, names)))

    def run(self, session: Session, completed: int, stopping: Callable[[], bool] = never_stop) -> float | None:
        """Validate after `completed` steps, and return the score, lower is better. All ranks must call it and get the same.

        Args:
            stopping: see `ValidationPass.run`. An abandoned pass leaves no row.

        Returns:
            None if the pass was abandoned, or if there is no score: then `check_score` raises.

        Raises:
            NonFiniteError: the loss is not finite. The row is written nevertheless.
            DataError: a sample could not be read.
        """
        result = self._pass.run(session, stopping)
        if result is None:
            return None
        self.completed = completed
        row = {"step": completed, **result}
        if self._is_writer:
            with self._path.open("a") as log:
                log.write(json_text(row) + "\n")
            self.trackers.log_validation(row)
        loss = float(row["loss"])
        if not math.isfinite(loss):
            raise NonFiniteError(f"validation after {completed} steps: loss is {loss}")
        return self._score(row)

    def check_score(self) -> None:
        """Check that validations had the metric of the score: apart from `run`, so that a checkpoint can be saved before.

        Raises:
            ConfigurationError: no validation sample had the term that is the metric.
        """
        if self._unscored is not None:
            raise self._unscored

    def _score(self, row: dict[str, Any]) -> float | None:
        metric = self._best.metric
        values = {**row.get("parts", {}), **row["terms"], "loss": row["loss"]}
        if metric not in values:
            message = f"no validation sample has {metric!r}: write another metric, and continue with --resume"
            self._unscored = ConfigurationError(Problem("checkpoint.keep_best.metric", message, did_you_mean(metric, values)))
            return None
        return float(values[metric]) * (-1.0 if self._best.mode == "max" else 1.0)
