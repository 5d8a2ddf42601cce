"""`metrics.jsonl`: one line a step, written by rank 0, in blocks, so that the step never waits for a number."""

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
    """Collects step results and writes them every `every` steps.

    Reading a loss waits for the device, so all of a block are read at once. Steps after `start` that an earlier, interrupted
    run had logged are taken out: they are about to be taken again.
    """

    def __init__(self, path: Path, *, start: int, every: int, writes: bool) -> None:
        self._path = path
        self._every = every
        self._writes = writes
        self._block: list[tuple[int, StepResult]] = []
        self._since = time.perf_counter()
        if writes and path.exists():
            lines = path.read_text().splitlines(keepends=True)
            write_text(path, "".join(line for line in lines if json.loads(line)["step"] < start))

    def add(self, step: int, result: StepResult) -> None:
        """Take in the result of a step.

        Raises:
            NonFiniteError: a block is full and holds a loss or norm that is not finite.
        """
        self._block.append((step, result))
        if len(self._block) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write what is collected; every rank calls it at the same steps. `step_s` is the mean over the block, checkpoints
        between its steps included; `samples` is what all ranks consumed in the step, counted by each.

        Raises:
            NonFiniteError: the block holds a loss or norm that is not finite; it is written all the same.
        """
        if not self._block:
            return
        samples = _over_ranks([result.samples for _, result in self._block], self._block[0][1].loss.device)
        rows = [self._row(*taken, count) for taken, count in zip(self._block, samples, strict=True)]
        now = time.perf_counter()
        step_s = (now - self._since) / len(rows)
        self._since, self._block = now, []
        if self._writes:
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


def _over_ranks(counts: list[int], device: torch.device) -> list[int]:
    """Counts of this rank, summed over all."""
    total = torch.tensor(counts, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return [int(count) for count in total]
