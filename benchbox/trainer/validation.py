"""Validation: the loss of the episodes that are not trained on, in one pass over all datasets."""

from __future__ import annotations

import json
import math
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from benchbox.data.loading.loader import load_samples
from benchbox.data.order.validation import validation_batches
from benchbox.data.samples.mixture import MixtureSamples
from benchbox.errors import ConfigurationError, NonFiniteError, Problem
from benchbox.store.files import write_text
from benchbox.trainer.evaluation import evaluating
from benchbox.trainer.sample_table import SampleTable, gather
from benchbox.trainer.validation_sums import ValidationSums

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.measure.phases import ProgressTracker
    from benchbox.session import Session
    from benchbox.spec.cell import Cell
    from benchbox.spec.validation_section import ValidationSection


class Validation:
    """Validates sessions of one cell at intervals, and appends a row to `validation.jsonl`.

    Every sample is computed once over all ranks, in a fixed order and with noise of its own, the same in every validation.
    Training does not notice: gradients, weights, modes, generators and loader processes are left as they are.

    Args:
        samples: of the training, on every rank; their validation frames are read.
        start: first step of this run. Rows of an interrupted run for later steps are removed, because these are repeated.
        tracker: shows the progress of a validation.

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
        path: Path,
        start: int,
        tracker: ProgressTracker,
    ) -> None:
        assert isinstance(samples, MixtureSamples), "a training file without episodes does not validate"
        segments = samples.validation_segments()
        if not len(segments):
            hint = "a dataset needs two episodes with frames that are drawn; leave out validation.every, or add data"
            raise ConfigurationError(Problem("validation.every", "no dataset has a validation episode", hint))
        self._section, self._cell, self._samples, self._rank = section, cell, samples, rank
        self._path, self._tracker = path, tracker
        self._largest = section.batch or cell.batch
        self._batches = validation_batches(
            segments, batch=self._largest, rank=rank, world_size=cell.world_size, max_samples=section.max_samples
        )
        if rank == 0 and path.exists():
            lines = path.read_text().splitlines(keepends=True)
            write_text(path, "".join(line for line in lines if json.loads(line)["step"] <= start))

    def is_due(self, completed: int, *, last: bool) -> bool:
        """Return whether to validate after `completed` steps: at intervals, after the last step, at the start on request."""
        return last or (completed % self._section.every == 0 if completed else self._section.at_start)

    def run(self, session: Session, completed: int) -> float:
        """Validate after `completed` steps, and return the loss. All ranks must call it, and get the same loss.

        Raises:
            NonFiniteError: the loss is not finite. The row is written nevertheless.
            DataError: a sample could not be read.
        """
        begin = time.perf_counter()
        with evaluating(session, self._cell.seed + self._rank):
            sums = self._sum_batches(session)
        seconds = time.perf_counter() - begin
        summary = sums.summary(self._samples.provenance, self._samples.shares)
        row: dict[str, Any] = {"step": completed, "seconds": seconds, **summary}
        if not summary["per_sample"]:
            row["reason"] = f"{self._cell.policy} returns no losses per sample: means are over all samples, without groups"
        if self._rank == 0:
            with self._path.open("a") as log:
                log.write(json.dumps(row) + "\n")
        loss = float(summary["loss"])
        if not math.isfinite(loss):
            raise NonFiniteError(f"validation after {completed} steps: loss is {loss}")
        return loss

    def _sum_batches(self, session: Session) -> ValidationSums:
        phase = self._tracker.phase
        sums: ValidationSums | None = None
        keys = [list(batch.keys) for batch in self._batches]
        with (
            closing(load_samples(self._samples, keys, self._cell.data.workers)) as loaded,
            self._tracker.within("validate", len(keys)),
        ):
            for planned in self._batches:
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
