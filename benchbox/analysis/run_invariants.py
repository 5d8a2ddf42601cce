"""Invariants of a run as a whole: plan, chain, files of ranks, events and tables agree with the records."""

from __future__ import annotations

import sys
from array import array
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from benchbox.analysis.rank_file_invariants import as_ranks_wrote, errors_agree, events_agree
from benchbox.analysis.run_check import LaunchKey, Problem, RunCheck
from benchbox.analysis.walk_invariants import Certificates, MonotonicWalks, SettledPairs
from benchbox.errors import BenchboxError, RecordError
from benchbox.spec.cell import Cell
from benchbox.store.chain import content_sha256, plan_sha256
from benchbox.store.files import read_json
from benchbox.store.table_reader import TableReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import RunStore

_CLOCK_STEP_S = 2.0  # by which the wall clock may have been set back between two launches


class _Plan(RunCheck):
    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self._cells = store.run().cells

    def add(self, record: LaunchRecord) -> Iterator[str]:
        if Cell.from_dict(dict(record["cell"])) != Cell.from_dict(dict(self._cells[record["cell_id"]])):
            yield "its cell is not that of the plan"

    def finish(self) -> Iterator[Problem]:
        for cell_id, cell in self._cells.items():
            if (expected := Cell.from_dict(dict(cell)).cell_id) != cell_id:
                yield None, f"run.json: the configuration of cell {cell_id} has the id {expected}"


class _Measured(RunCheck):
    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self._measure = store.run().measure

    def add(self, record: LaunchRecord) -> Iterator[str]:
        recorded: Mapping[str, object] = {**record, "memory_limit": record.get("memory_limit_bytes")}
        names = ("warmup_steps", "steps", *(("memory_limit",) if "memory_limit_bytes" in record else ()))
        for name in names:
            if name in self._measure and recorded[name] != self._measure[name]:
                text = f"it was measured with {name} {recorded[name]}, and the plan asks for {self._measure[name]}"
                yield f"{text}: the same command, without --only, measures it again"


class _SameCell(RunCheck):
    """Launches must not differ from an earlier one of their cell, by the same sources, in what has no noise."""

    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self._first: dict[tuple[str, ...], tuple[int, dict[str, object]]] = {}

    def add(self, record: LaunchRecord) -> Iterator[str]:
        observed, flops, environment = record["observed"], record["flops"], record["environment"] or {}
        if record["status"] != "ok" or observed is None:
            return
        sources = (
            record["cell_id"],
            *(str(environment.get(name)) for name in ("benchbox_sha256", "policy_sha256", "data_sha256", "torch")),
        )
        values: dict[str, object] = {
            name: observed.get(name) for name in ("model_class", "sharding", "shard_numel", "trainable_numel", "total_numel")
        }
        values["FLOPs"] = flops["model_flops_per_step"] if flops else None
        other, expected = self._first.setdefault(sources, (record["launch"], values))
        for name, value in values.items():
            if value != expected[name]:
                yield f"{name} is {value}, and {expected[name]} in launch {other}"


class _OneAfterAnother(RunCheck):
    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self._starts, self._ends = array("d"), array("d")  # seconds since the epoch
        self._keys: list[LaunchKey] = []

    def add(self, record: LaunchRecord) -> Iterable[str]:
        start = datetime.fromisoformat(record["started_at"]).timestamp()
        self._starts.append(start)
        self._ends.append(start + record["duration_s"])
        self._keys.append((record["cell_id"], record["launch"]))
        return ()

    def finish(self) -> Iterator[Problem]:
        order = sorted(range(len(self._keys)), key=self._starts.__getitem__)
        for earlier, later in pairwise(order):
            late_s = self._ends[earlier] - self._starts[later]
            if late_s > _CLOCK_STEP_S:
                cell_id, launch = self._keys[earlier]
                yield self._keys[later], f"it started {late_s:.1f} s before launch {launch} of {cell_id} ended"


class _Chain(RunCheck):
    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self._plan: str | None = None
        self._history: dict[LaunchKey, tuple[str | None, ...]] = {}  # oldest first
        reader = store.chain.read()
        for entry in reader:
            if entry["kind"] == "plan":
                self._plan = entry["sha256"]
            else:
                key = sys.intern(entry["cell_id"]), entry["launch"]
                self._history[key] = (*self._history.get(key, ()), entry["sha256"])
        self._defect = reader.defect if store.chain.exists() else "missing: what was edited cannot be told"

    def add(self, record: LaunchRecord) -> Iterator[str]:
        if self._defect:
            return
        sha256, recorded = content_sha256(record), self._history.pop((record["cell_id"], record["launch"]), ())
        if sha256 in recorded[:-1] and sha256 != recorded[-1]:
            yield "an earlier record of this launch: the last one was removed, or the run was killed before writing it"
        elif sha256 not in recorded:
            yield "edited after it was measured" if recorded else "not measured by this run: the chain does not have it"

    def finish(self) -> Iterator[Problem]:
        if self._defect:
            yield None, f"chain.jsonl: {self._defect}"
            return
        if self._plan != plan_sha256(read_json(self.store.path / "run.json")):
            yield None, "run.json is not the plan of the last run: it was edited"
        planned = self.store.run().cells
        for (cell_id, launch), recorded in self._history.items():
            if recorded[-1] is not None and cell_id in planned:
                yield None, f"the record of launch {launch} of {cell_id} was removed, or the run was killed before writing it"


class LaunchFolders(RunCheck):
    """Records must agree with the files in the folders of their launches, where there are such files."""

    applies = False

    def __init__(self, store: RunStore, compare: Callable[[LaunchRecord, Path], list[str] | None]) -> None:
        super().__init__(store)
        self._compare = compare

    def add(self, record: LaunchRecord) -> Iterable[str]:
        messages = self._compare(record, self.store.launch_dir(record["cell_id"], record["launch"]))
        self.applies = self.applies or messages is not None
        return messages or ()


class MadeOfRecords(RunCheck):
    """A check of files that are made of the records, for those that are not older than any of them."""

    names: tuple[str, ...]

    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self.paths = [path for name in self.names if (path := store.path / name).is_file()]
        self._newest = 0.0
        if self.paths and not store.is_packed:
            self._newest = (store.path / "run.json").stat().st_mtime  # a plan that changed since has other cells

    def add(self, record: LaunchRecord) -> Iterable[str]:
        if not self.store.is_packed:
            written = self.store.record_path(record["cell_id"], record["launch"]).stat().st_mtime
            self._newest = max(self._newest, written)
        return ()

    def current(self) -> list[Path]:
        """Return the files that are not older than the plan or any record that was added."""
        return [path for path in self.paths if self._newest <= path.stat().st_mtime]


class _Tables(MadeOfRecords):
    names = ("table.csv", "table.parquet")

    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self._tables = {path: TableReader(path) for path in self.paths}
        self._problems: dict[Path, list[str]] = {path: [] for path in self.paths}

    def add(self, record: LaunchRecord) -> Iterable[str]:
        super().add(record)
        for path in list(self._tables):
            self._add_problems(path, lambda table: table.differences(record))
        return ()

    def _add_problems(self, path: Path, find: Callable[[TableReader], list[str]]) -> None:
        try:
            self._problems[path] += find(self._tables[path])
        except RecordError as error:  # of a table that is older than a record it does not matter: see `current`
            self._problems[path] = [str(error)]
            del self._tables[path]

    def finish(self) -> Iterator[Problem]:
        current = self.current()
        self.applies = bool(current)
        for path in current:
            if path in self._tables:
                self._add_problems(path, TableReader.rows_without_record)
            yield from ((None, f"{path.name}: {text}") for text in sorted(self._problems[path]))


@dataclass(frozen=True, slots=True)
class RunInvariant:
    """A statement on a run, and the check of it."""

    sentence: str
    check: Callable[[RunStore], RunCheck]


RUN_INVARIANTS = (
    RunInvariant("cells of records are those of the plan", _Plan),
    RunInvariant("launches were measured as the plan asks", _Measured),
    RunInvariant("launches of a cell have the same shards, sizes and FLOPs", _SameCell),
    RunInvariant("launches ran one after another", _OneAfterAnother),
    RunInvariant("records are those that the chain has", _Chain),
    RunInvariant("records are what their ranks wrote", partial(LaunchFolders, compare=as_ranks_wrote)),
    RunInvariant("step times agree with the events of the ranks", partial(LaunchFolders, compare=events_agree)),
    RunInvariant("errors are those that the ranks reported", partial(LaunchFolders, compare=errors_agree)),
    RunInvariant("tables are those of the records", _Tables),
    RunInvariant("no batch of a walk fits above one that does not", MonotonicWalks),
    RunInvariant("pairs that an earlier look settled are so by their launches", SettledPairs),
    RunInvariant("a walk that has ended has both launches of its certificate", Certificates),
)

# A run that cannot even be checked was damaged or edited: that is a violation, not an internal error.
_MALFORMED = (BenchboxError, AttributeError, AssertionError, LookupError, OSError, TypeError, ValueError, ZeroDivisionError)


class RunInvariantCheck:
    """The check of one invariant over a run, whose first error is a violation and ends it."""

    def __init__(self, invariant: RunInvariant, store: RunStore) -> None:
        self._problems: list[Problem] = []
        self._check: RunCheck | None = None  # None after an error
        with self._errors():
            self._check = invariant.check(store)

    def add(self, record: LaunchRecord) -> None:
        """Check one record."""
        if self._check is not None:
            with self._errors():
                key = record["cell_id"], record["launch"]
                self._problems += [(key, message) for message in self._check.add(record)]

    def finish(self) -> list[Problem] | None:
        """Return the violations with the keys of their launches, or None where the invariant does not apply."""
        if self._check is not None:
            with self._errors():
                self._problems += self._check.finish()
        return self._problems if self._check is None or self._check.applies else None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except _MALFORMED as error:
            self._check = None
            self._problems = [(None, f"malformed ({type(error).__name__}: {error})")]
