"""Trainings that save checkpoints and continue from them, in real ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from benchbox.dcp.files import TensorFolder
from benchbox.store.checkpoints import checkpoint_name
from tests.support.ranks import RANK_SCRIPTS, run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from benchbox.spec.cell import Cell


@dataclass(frozen=True, slots=True)
class TrainingPart:
    """A training of `cell` to step `steps`, anew or from a checkpoint, which saves into `folder` every `every` steps."""

    cell: Cell
    folder: Path
    steps: int
    restore: Path | None = None
    every: int = 100
    section: dict[str, Any] = field(default_factory=dict)
    averages: bool = True  # tensors in place of averages of the weights: the weights and 1
    spikes: tuple[int, ...] = ()  # steps with actions that are 1000 times as large

    def checkpoint(self, steps: int | None = None) -> Path:
        return self.folder / checkpoint_name(self.steps if steps is None else steps)

    def rows(self) -> list[dict[str, Any]]:
        """Return loss, gradient norm, rates and whether it was skipped, of every step that this part took."""
        return json.loads((self.folder / "rows.json").read_text())

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows()]

    def tensors(self, steps: int | None = None) -> dict[str, Tensor]:
        """Return everything that was saved after `steps` steps, without the random generators."""
        return _read_tensors(self.checkpoint(steps) / "tensors")

    def trainer(self, steps: int | None = None) -> dict[str, Any]:
        return json.loads((self.checkpoint(steps) / "trainer.json").read_text())


@cache
def _read_tensors(path: Path) -> dict[str, Tensor]:
    folder = TensorFolder(path)
    return folder.read([key for key in folder.layout if not key.startswith("rng/")])


def run_parts(parts: Sequence[TrainingPart]) -> None:
    """Run trainings of one world size, one after another in one process group."""
    (ranks,) = {part.cell.world_size for part in parts}
    entries = [
        {
            "cell": part.cell.to_dict(),
            "folder": str(part.folder),
            "steps": part.steps,
            "restore": None if part.restore is None else str(part.restore),
            "every": part.every,
            "section": part.section,
            "averages": part.averages,
            "spikes": part.spikes,
        }
        for part in parts
    ]
    for part in parts:
        part.folder.mkdir(parents=True, exist_ok=True)
    job = parts[0].folder / "job.json"
    job.write_text(json.dumps({"parts": entries}))
    run_ranks(ranks, RANK_SCRIPTS / "resumes.py", str(job))
