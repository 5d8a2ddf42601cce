"""`metrics.jsonl`: one line per step, written by rank 0 in blocks, so that steps do not wait for values of the device."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchbox.errors import NonFiniteError
from benchbox.store.files import write_text

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.session import StepResult


class MetricsLog:
    """Log of step results, written in blocks of steps.

    Reading a loss waits for the device, so the results of a block are read together.

    Args:
        start: first step of this run. Lines of an interrupted run for this and later steps are removed from the file, because
            these steps are repeated.
        block_steps: number of steps in a block.
        is_writer: whether this rank writes the file.
    """

    def __init__(self, path: Path, *, start: int, block_steps: int, is_writer: bool) -> None:
        self._path = path
        self._block_steps = block_steps
        self._is_writer = is_writer
        self._block: list[tuple[int, StepResult]] = []
        self._block_start_s = time.perf_counter()
        if is_writer and path.exists():
            lines = path.read_text().splitlines(keepends=True)
            write_text(path, "".join(line for line in lines if json.loads(line)["step"] < start))

    def add(self, step: int, result: StepResult) -> None:
        """Add the result of a step, and write the block if it is full.

        Raises:
            NonFiniteError: the full block contains a loss or gradient norm that is not finite.
        """
        self._block.append((step, result))
        if len(self._block) >= self._block_steps:
            self.flush()

    def flush(self) -> None:
        """Write the current block. All ranks must call it after the same steps.

        `step_s` is the mean over the block, including checkpoints between its steps; `samples` is the number of samples that
        all ranks consumed in the step, counted on each rank.

        Raises:
            NonFiniteError: the block contains a loss or gradient norm that is not finite. It is written nevertheless.
        """
        if not self._block:
            return
        samples = _sum_over_ranks([result.samples for _, result in self._block], self._block[0][1].loss.device)
        rows = [self._row(step, result, count) for (step, result), count in zip(self._block, samples, strict=True)]
        now = time.perf_counter()
        step_s = (now - self._block_start_s) / len(rows)
        self._block_start_s, self._block = now, []
        if self._is_writer:
            with self._path.open("a") as log:
                log.writelines(json.dumps({**row, "step_s": step_s}) + "\n" for row in rows)
        for row in rows:
            for name in ("loss", "grad_norm"):
                if not math.isfinite(row[name]):
                    raise NonFiniteError(f"step {row['step']}: {name} is {row[name]}")

    @staticmethod
    def _row(step: int, result: StepResult, samples: int) -> dict[str, float]:
        return {
            "step": step,
            "loss": float(result.loss),
            "grad_norm": float(result.grad_norm),
            "lr": result.lr[0],
            "samples": samples,
            **{name: float(part) for name, part in result.parts.items()},
        }


def _sum_over_ranks(counts: list[int], device: torch.device) -> list[int]:
    """Return the sums of counts over all ranks."""
    total = torch.tensor(counts, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return [int(count) for count in total]
