"""`metrics.jsonl`: one line per step, written by rank 0 in blocks, so that steps do not wait for values of the device."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchbox.errors import NonFiniteError
from benchbox.store.files import json_text, keep_rows
from benchbox.trainer.sample_table import gather
from benchbox.trainer.trackers.fan_out import Trackers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchbox.session import StepResult
    from benchbox.trainer.gauges import TrainingGauges


class MetricsLog:
    """Log of step results, written in blocks of steps.

    Reading a loss waits for the device, so the results of a block are read together.

    Args:
        start: first step of this run. Lines of an interrupted run for this and later steps are removed from the file, because
            these steps are repeated.
        block_steps: number of steps in a block.
        is_writer: whether this rank writes the file.
        warning: called after every block until it returns a text, which is added to the last row of the block.
        take_warnings: called after every block; the texts that it returns are added likewise.
        gauges: values of every row besides the results of the step.
        trackers: get the same rows, on the rank that writes.
    """

    def __init__(
        self,
        path: Path,
        *,
        start: int,
        block_steps: int,
        is_writer: bool,
        warning: Callable[[], str | None] = lambda: None,
        gauges: TrainingGauges | None = None,
        trackers: Trackers | None = None,
        take_warnings: Callable[[], list[str]] = list,
    ) -> None:
        self._path = path
        self._block_steps = block_steps
        self._is_writer = is_writer
        self._warning: Callable[[], str | None] | None = warning
        self._take_warnings = take_warnings
        self._gauges = gauges
        self._trackers = trackers or Trackers()
        self._block: list[tuple[int, StepResult]] = []
        self._block_start_s = time.perf_counter()
        self._outside_s: dict[str, float] = {}  # since then, by activity
        self._warns_of_no_parts = True  # once
        if is_writer and path.exists():
            keep_rows(path, lambda step: step < start)

    def add(self, step: int, result: StepResult) -> None:
        """Add the result of a step, and write the block if it is full.

        Raises:
            NonFiniteError: the full block contains a loss or gradient norm that is not finite.
        """
        self._block.append((step, result))
        if len(self._block) >= self._block_steps:
            self.flush()

    @contextmanager
    def outside_steps(self, activity: str) -> Iterator[None]:
        """Return the context of a validation or other activity between steps, whose time and memory are not those of steps.

        The current block is written first, as by `flush`. The first row after the activity has its seconds as
        `outside_steps_s`.
        """
        self.flush()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._outside_s[activity] = self._outside_s.get(activity, 0.0) + time.perf_counter() - begin
            if self._gauges is not None:
                self._gauges.reset_peaks()

    def flush(self) -> None:
        """Write the current block. All ranks must call it after the same steps.

        `step_s` is the mean over the block, without `outside_steps`; `samples` is the number of samples that all ranks consumed
        in the step, counted on each rank. The terms of the loss are means over those samples of all ranks that have them; a
        term that no sample of the step has is left out.

        Raises:
            NonFiniteError: the block contains a loss or gradient norm that is not finite. It is written nevertheless.
        """
        if not self._block:
            return
        device, results = self._block[0][1].loss.device, [result for _, result in self._block]
        samples = _sum_over_ranks([result.samples for result in results], device)
        parts = _mean_parts(results, device)
        rows: list[dict[str, Any]] = [self._row(*values) for values in zip(self._block, samples, parts, strict=True)]
        now = time.perf_counter()
        step_s = (now - self._block_start_s - sum(self._outside_s.values())) / len(rows)
        gauged = [{} for _ in rows] if self._gauges is None else self._gauges.read([step for step, _ in self._block], step_s)
        rows = [{**row, "step_s": step_s, **values} for row, values in zip(rows, gauged, strict=True)]
        if self._outside_s:
            rows[0]["outside_steps_s"] = self._outside_s
        self._block_start_s, self._outside_s, self._block = now, {}, []
        names = {name for result in results for name in result.parts}
        self._write(rows, empty_parts=() if any(parts) else sorted(names))
        for row in rows:
            for name in () if row.get("skipped") else ("loss", "grad_norm"):
                if not math.isfinite(row[name]):
                    raise NonFiniteError(f"step {row['step']}: {name} is {row[name]}")

    def _write(self, rows: list[dict[str, Any]], empty_parts: Sequence[str]) -> None:
        """Append rows to the file, the last with the warnings of the block, and pass them on to the trackers.

        Args:
            empty_parts: names of the parts of the loss, if no sample of the block has any of them.
        """
        if not self._is_writer:
            return
        for row in rows:
            self._trackers.log(row)
        warnings = [*self._trackers.take_warnings(), *self._take_warnings()]
        if self._warning is not None and (text := self._warning()) is not None:
            self._warning = None
            warnings.append(text)
        if empty_parts and self._warns_of_no_parts:
            self._warns_of_no_parts = False
            steps = f"steps {rows[0]['step']} to {rows[-1]['step']}" if len(rows) > 1 else f"step {rows[0]['step']}"
            warnings.append(
                f"no sample of {steps} has what a part of the loss ({', '.join(empty_parts)}) is computed from: nothing was "
                "learned; check what the dataset has of it with benchbox data inspect"
            )
        if warnings:
            rows[-1]["warning"] = "; ".join(warnings)
        with self._path.open("a") as log:
            log.writelines(json_text(row) + "\n" for row in rows)

    @staticmethod
    def _row(entry: tuple[int, StepResult], samples: int, parts: dict[str, float]) -> dict[str, float]:
        step, result = entry
        return {
            "step": step,
            "loss": float(result.loss),
            "grad_norm": float(result.grad_norm),
            "lr": result.lr[-1],  # of the head, or of what no pattern of optim.groups matches: the backbone's may be 0 yet
            "samples": samples,
            **({"skipped": True} if result.skipped else {}),
            **parts,
        }


def _sum_over_ranks(counts: list[int], device: torch.device) -> list[int]:
    """Return the sums of counts over all ranks."""
    total = torch.tensor(counts, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return [int(count) for count in total]


def _mean_parts(results: list[StepResult], device: torch.device) -> list[dict[str, float]]:
    """Return the parts of each step as means over those samples of all ranks that have them, without parts that none has."""
    names = list(dict.fromkeys(name for result in results for name in result.parts))
    sums = torch.zeros(len(results), len(names), 2, device=device)  # of the values, and of the numbers of samples
    for row, result in zip(sums, results, strict=True):
        for name, part in result.parts.items():
            count = result.part_counts[name]
            row[names.index(name)] = torch.stack((part * count, count))
    if not names:
        return [{} for _ in results]
    totals = torch.zeros_like(sums, dtype=torch.float64)
    for rank_sums in gather(sums.flatten()):  # an all-reduce adds in an order that depends on the size of the block
        totals += rank_sums.view_as(sums)
    return [
        {name: total / count for name, (total, count) in zip(names, step, strict=True) if count} for step in totals.tolist()
    ]
