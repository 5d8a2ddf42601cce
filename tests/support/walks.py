"""Runs of walks on a machine with a given memory, whose launches are written without starting a process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from benchbox.cli.walk_launches import WalkLaunches, find_records, plan_walks
from benchbox.launch.changed_environment import installed_versions
from benchbox.launch.fingerprint import benchbox_sha256, policy_sha256
from benchbox.launch.resume import pending_launches
from benchbox.launch.runner import RunSummary
from benchbox.spec.cell import Cell, MeasureSpec
from benchbox.spec.matrix import BatchSearch
from benchbox.store.run import RunStore
from tests.support.example_run import MEASURE, OOM, example_record, example_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.launch.resume import Launches

START = Cell(policy="value", size="tiny", backend="ddp", world_size=2, batch=2)
OUT_OF_MEMORY = OOM | {"stage": "warmup", "step": 1, "operation": "aten.mm.default"}


class Killed(BaseException):
    """The end of the process in the middle of a run."""


@dataclass
class Machine:
    """A machine on which every set-up has a largest batch. `launched` are the launches that really ran, in order."""

    folder: Path
    largest: Callable[[Cell], int]
    starts: Sequence[Cell] = (START,)
    measure: MeasureSpec = MEASURE
    search: BatchSearch = field(default_factory=lambda: BatchSearch(start=2))
    predicted: int | None = None
    fastest: int = 4  # the batch at which throughput is highest
    slowdown: float = 1.0  # of every step
    day: str = "2026-01-01"  # of all launches
    failures: dict[int, str] = field(default_factory=dict)  # status of launches at these batches
    launched: list[tuple[Cell, int]] = field(default_factory=list)
    only: Sequence[Cell] = ()  # first cells of the walks that commands select; all if empty

    @property
    def store(self) -> RunStore:
        return RunStore(self.folder)

    @property
    def batches(self) -> list[int]:
        return [cell.batch for cell, _ in self.launched]

    def run(self, *, fresh: bool = False, at_most_launches: int = 1000) -> tuple[WalkLaunches, RunSummary]:
        """Run or resume the walks like `benchbox run`; after so many launches the process is killed."""
        store, budget = self.store, len(self.launched) + at_most_launches
        walks = self.open(fresh=fresh)
        earlier = find_records(store, (), self.only or self.starts) if fresh else []
        store.write_run(walks.run)
        for record in earlier:
            store.remove_record(*record)

        def launch(launches: Launches) -> RunSummary:
            pending = pending_launches(launches, self.measure, store, (), fresh=fresh)
            summary = RunSummary(reused=pending.reused)
            for cell, number in pending.launches:
                if len(self.launched) >= budget:
                    raise Killed
                self.launched.append((cell, number))
                record = self._record(cell, number)
                store.write_record(record)
                summary.executed += 1
                if record["status"] != "ok":
                    summary.failed_cells.add(cell.cell_id)
            return summary

        return walks, walks.launch(launch, _Silent())

    def open(self, *, fresh: bool = False) -> WalkLaunches:
        """Return the walks as a command finds them."""
        axes = {"backend": ["ddp"], "batch": {"search": "max", "start": self.search.start}}
        described = example_run(list(self.starts), measure=asdict(self.measure), matrix={"axes": axes})
        earlier = self.store.run() if (self.folder / "run.json").is_file() else None
        selected = self.only or self.starts
        planned = plan_walks(described, self.starts, self.search, earlier, selected if fresh else ())
        for walk in planned.walks:
            walk["predicted_batch"] = self.predicted
        return WalkLaunches(planned, self.store, selected, self.measure, (), fresh)

    def _record(self, cell: Cell, number: int) -> Any:
        status = self.failures.get(cell.batch, "ok" if cell.batch <= self.largest(cell) else "oom")
        step_s = 0.1 * self.slowdown * cell.batch * (1 + 0.1 * abs(cell.batch - self.fastest))
        error = None if status == "ok" else OUT_OF_MEMORY | {"type": "OutOfMemoryError" if status == "oom" else "Error"}
        record = example_record(cell, number, status=status, error=error, **({"step_s": step_s} if status == "ok" else {}))
        environment = {
            "benchbox_sha256": benchbox_sha256(),
            "policy_sha256": policy_sha256(cell.policy, ()),
        } | installed_versions()
        return record | {
            "environment": {**(record["environment"] or {}), **environment},
            "memory_limit_bytes": self.measure.memory_limit,
            "started_at": f"{self.day}T{len(self.launched) // 60:02}:{len(self.launched) % 60:02}:00+00:00",
        }


class _Silent:
    """A console that prints nothing."""

    def print(self, *_: object, **__: object) -> None: ...


def cameras(*counts: int) -> tuple[Cell, ...]:
    """Return starts of walks that differ in their cameras."""
    return tuple(replace(START, cams=count) for count in counts)
