"""Launches of commands that take no time: records are written as if the launches had run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchbox.launch.changed_environment import installed_versions
from benchbox.launch.fingerprint import benchbox_sha256, policy_sha256
from benchbox.launch.resume import pending_launches
from benchbox.launch.runner import RunSummary
from tests.support.example_run import steady_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchbox.launch.resume import Launches
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.run import RunStore


def matrix_of_backends(*backends: str, launches: int) -> str:
    """Return a matrix of cells that differ in the backend, each compared with that of DDP."""
    return f"""
name: looks
policy: pi05
size: tiny
data: synthetic
world_size: 2
batch: 1
recipe: fp32
axes:
  backend: [{", ".join(backends)}]
measure: {{warmup_steps: 1, steps: 2, launches: {launches}}}
reference: {{backend: ddp}}
"""


@dataclass
class InstantLaunches:
    """Stands in for `run_matrix`. `launched` are the launches so far; `at_most` of them fit into a budget."""

    step_s: Mapping[str, float] = field(default_factory=dict)  # by backend; 0.2 for others
    noise: Mapping[str, float] = field(
        default_factory=dict
    )  # by backend: share by which launches are slower and faster in turn
    at_most: int | None = None
    launched: list[tuple[Cell, int]] = field(default_factory=list)

    def __call__(
        self,
        launches: Launches,
        *,
        measure: MeasureSpec,
        store: RunStore,
        policy_dirs: Sequence[Path] = (),
        fresh: bool = False,
        **_: object,
    ) -> RunSummary:
        summary = RunSummary()
        for cell, number in pending_launches(launches, measure, store, policy_dirs, fresh=fresh).launches:
            if self.at_most is not None and len(self.launched) >= self.at_most:
                summary.out_of_time, summary.remaining = True, summary.remaining + 1
                continue
            self.launched.append((cell, number))
            store.write_record(self._record(cell, number, measure, policy_dirs))
        return summary

    def _record(self, cell: Cell, number: int, measure: MeasureSpec, policy_dirs: Sequence[Path]) -> Any:
        step_s = self.step_s.get(cell.backend, 0.2) * (1 + self.noise.get(cell.backend, 0.0) * (-1) ** number)
        record = steady_records(cell, step_s=step_s, launches=number)[-1]
        sources = {
            "benchbox_sha256": benchbox_sha256(),
            "policy_sha256": policy_sha256(cell.policy, policy_dirs),
        } | installed_versions()
        return record | {
            "environment": {**record["environment"], **sources},
            "steps": measure.steps,
            "warmup_steps": measure.warmup_steps,
            "memory_limit_bytes": measure.memory_limit,
        }
