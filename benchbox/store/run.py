"""A run directory: the plan (`run.json`) and one record for every launch that ran.

```
run.json
chain.jsonl                         digests of the plan and of every record, see `benchbox.store.chain`
cells/<cell id>/launch-<n>.json     the record
cells/<cell id>/launch-<n>/         job, events, results and logs of every rank of the launch
```

A published run has `records.parquet` in place of `cells/`: the same records in one file (`benchbox report RUN --pack`).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from benchbox import __version__
from benchbox.errors import ConfigurationError, Problem, RecordError
from benchbox.store.chain import Chain, content_sha256, plan_sha256
from benchbox.store.files import read_json, write_json, write_text
from benchbox.store.json_types import type_problem
from benchbox.store.packed import packed_keys, read_packed, write_packed
from benchbox.store.predictions import FILE as PREDICTIONS
from benchbox.store.record import SCHEMA_VERSION, check_keys, check_record, check_version, share_equal_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.registry.launch_record import CellDict, LaunchRecord


class _CellTypes(TypedDict):
    """Field of a cell by which it is called where no field varies; there are others."""

    backend: str


class _PlannedCell(TypedDict):
    cell_id: str
    cell: _CellTypes


class _MeasureTypes(TypedDict):
    """Numbers by which a cell is measured; there are other fields."""

    warmup_steps: int
    steps: int
    launches: int


class _SkippedCell(TypedDict):
    cell: _CellTypes
    reason: str


class Walk(TypedDict):
    """Search for the largest batch that fits, at one point of the other axes."""

    cells: list[str]  # ids of the batches that are tried, the first of them first
    at_most: int | None
    predicted_batch: int | None  # the largest that fits, by theory
    prediction_reason: str | None  # why nothing is predicted
    fastest: str | None  # id of the cell with the highest throughput, which alone is launched several times; null until the end


class _RunFile(TypedDict, total=False):
    """Content of `run.json`."""

    name: str
    matrix_file: str
    matrix: dict[str, Any]
    reference: dict[str, Any]
    thresholds: list[dict[str, Any]]
    measure: _MeasureTypes
    cells: list[_PlannedCell]
    skipped: list[_SkippedCell]
    sequential: dict[str, Any] | None
    walks: list[Walk]
    options: list[str]
    earlier_tests: list[int]
    benchbox_version: str
    created_at: str


_LAUNCH = re.compile(r"launch-([1-9][0-9]*)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The plan of a run: cells are `Cell.to_dict()` by id, thresholds `Threshold.to_dict()`, measure `asdict(MeasureSpec)`."""

    name: str
    matrix_file: str  # as named on the command line
    matrix: Mapping[str, Any]  # resolved values
    reference: Mapping[str, Any]
    thresholds: Sequence[Mapping[str, Any]]
    measure: Mapping[str, Any]
    cells: Mapping[str, CellDict]
    skipped: Sequence[Mapping[str, Any]]  # {"cell": {...}, "reason": "..."}
    # Of `--launches auto`: {"looks": [launches, ...], "resolution": ..., "looks_taken": number of looks that the launches have
    # had (not in older runs), "launches": {cell id: of one that stopped early}, "settled": {ids of both cells of a pair:
    # verdict of the look that settled it, before the last}}
    sequential: Mapping[str, Any] | None = None
    walks: Sequence[Walk] = field(default_factory=list)
    # Words of the command that decide what a cell is, of --set and --policy-dir; none in older runs.
    options: Sequence[str] = field(default_factory=list)
    earlier_tests: Sequence[int] = field(default_factory=list)  # numbers of launches after which commands before tested pairs
    benchbox_version: str = __version__
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        if self.launches < 1:
            raise ValueError(f"{self.launches} launches")

    @property
    def launches(self) -> int:
        """Number of launches planned for every cell; with `sequential`, those of the last look that was reached."""
        return int(self.measure["launches"])

    @property
    def matrix_path(self) -> Path | None:
        """Return the file of the matrix; None where it is not here, or in a folder that this user may not look into."""
        with suppress(OSError):
            if (path := Path(self.matrix_file)).is_file():
                return path
        return None

    @property
    def cells_of_walks(self) -> set[str]:
        """Ids of the batches that walks have come to: the first launch of each searched."""
        return {cell_id for walk in self.walks for cell_id in walk["cells"]}

    def planned_launches(self) -> dict[str, int]:
        """Return the number of launches planned for every cell: one for a batch of a walk, unless it is its fastest.

        With `sequential`, cells of pairs that were settled at an earlier look have those of that look.
        """
        early: dict[str, int] = (self.sequential or {}).get("launches", {})
        planned = dict.fromkeys(self.cells, self.launches) | early
        tried = [(cell_id, walk["fastest"]) for walk in self.walks for cell_id in walk["cells"]]
        return planned | {cell_id: 1 for cell_id, fastest in tried if cell_id != fastest}


def _check_plan(run: Run) -> None:
    """Raise ValueError for a plan that contradicts itself."""
    if not all(walk["cells"] for walk in run.walks):
        raise ValueError("a walk without batches")
    if unknown := run.cells_of_walks - run.cells.keys():
        raise ValueError(f"a walk with the cell {min(unknown)}, which is not planned")
    if run.sequential is not None and not run.sequential.get("looks"):
        raise ValueError("sequential without looks")


class RunStore:
    """One run directory. Reading never writes, and writing is atomic, so it can be read while it is being filled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cells = path / "cells"
        self._packed_path = path / "records.parquet"
        self.chain = Chain(path / "chain.jsonl")

    @property
    def is_packed(self) -> bool:
        """Return whether the records are in `records.parquet`. Records in `cells/` are newer and take precedence."""
        return self._packed_path.is_file() and not any(self._cells.glob("*/launch-*.json"))

    @cached_property
    def _packed(self) -> dict[tuple[str, int], LaunchRecord]:
        return {(record["cell_id"], record["launch"]): record for record in read_packed(self._packed_path)}

    def write_run(self, run: Run) -> None:
        """Write the plan.

        Raises:
            RecordError: this is a published run, which is not changed.
            ConfigurationError: the directory holds a run of another name.
        """
        if self.is_packed:
            raise RecordError(f"{self.path}: a published run (its records are packed); choose another directory: --out DIR")
        with suppress(RecordError):  # there is none, or a damaged one, which is replaced
            if (name := read_json(self.path / "run.json").get("name")) not in (None, run.name):
                problem = f"holds the run {name}, whose plan {run.name} would replace"
                raise ConfigurationError(Problem(str(self.path), problem, "choose another directory: --out DIR"))
        cells = [{"cell_id": cell_id, "cell": dict(cell)} for cell_id, cell in run.cells.items()]
        values = {"schema_version": SCHEMA_VERSION, **asdict(run), "cells": cells}
        sha256 = plan_sha256(values)
        plans = [entry["sha256"] for entry in self.chain.read() if entry["kind"] == "plan"]
        if plans[-1:] != [sha256]:
            self.chain.append({"kind": "plan", "sha256": sha256})
        write_json(self.path / "run.json", values)

    def run(self) -> Run:
        """Read the plan.

        Raises:
            RecordError: this is not a run directory, or its `run.json` cannot be read.
        """
        path = self.path / "run.json"
        if self.path.is_file():
            raise RecordError(f"{self.path}: a file, not a run directory; `benchbox run MATRIX` makes one")
        if not self.path.is_dir():
            raise RecordError(f"{self.path}: no such run directory; `benchbox run MATRIX` makes one")
        if not path.is_file():
            raise RecordError(f"{self.path}: not a run directory (it has no run.json); `benchbox run MATRIX` makes one")
        values = read_json(path)
        check_version(values, str(path))
        check_keys(values, ("schema_version", *Run.__slots__), str(path))
        del values["schema_version"]
        if problem := type_problem(values, _RunFile):
            raise RecordError(f"{path}: not what benchbox writes ({problem})")
        try:
            cells = {entry["cell_id"]: entry["cell"] for entry in values.pop("cells")}
            run = Run(**values, cells=cells)
            _check_plan(run)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path}: not what benchbox writes ({type(error).__name__}: {error})") from None
        return run

    def launch_dir(self, cell_id: str, launch: int) -> Path:
        """Return the folder in which a launch keeps its job, events, rank results and logs."""
        return self._cells / cell_id / f"launch-{launch}"

    def record_path(self, cell_id: str, launch: int) -> Path:
        return self._cells / cell_id / f"launch-{launch}.json"

    def write_record(self, record: LaunchRecord) -> Path:
        """Write a launch record and return its path.

        Raises:
            RecordError: it is not a launch record.
        """
        path = self.record_path(record["cell_id"], record["launch"])
        check_record(record, str(path))
        key = {"cell_id": record["cell_id"], "launch": record["launch"]}
        self.chain.append({"kind": "record", **key, "sha256": content_sha256(record)})
        write_json(path, record)
        return path

    def remove_record(self, cell_id: str, launch: int) -> None:
        """Remove a record that is no longer true of its cell, if there is one."""
        path = self.record_path(cell_id, launch)
        if path.is_file():
            self.chain.append({"kind": "removed", "cell_id": cell_id, "launch": launch, "sha256": None})
            path.unlink()

    def stored_launches(self) -> list[tuple[str, int]]:
        """Return (id of the cell, launch) of every record that is here, also of cells that the plan no longer has."""
        files = ((path.parent.name, _LAUNCH.fullmatch(path.name)) for path in self._cells.glob("*/launch-*.json"))
        return sorted((cell_id, int(name[1])) for cell_id, name in files if name)

    def record(self, cell_id: str, launch: int) -> LaunchRecord | None:
        """Return a launch's record, or None when the launch has none.

        Raises:
            RecordError: the file is damaged or of a newer schema; the message names it.
        """
        if self.is_packed:
            return self._packed.get((cell_id, launch))
        path = self.record_path(cell_id, launch)
        if not path.is_file():
            return None
        record = read_json(path)
        check_record(record, str(path))
        if (record["cell_id"], record["launch"]) != (cell_id, launch):
            raise RecordError(
                f"{path}: holds launch {record['launch']} of cell {record['cell_id']}: it was moved or copied here"
            )
        return cast("LaunchRecord", record)

    def records(self) -> Iterator[LaunchRecord]:
        """Yield the records of the planned cells, in the order of the plan, then by launch.

        Records of cells that are no longer planned are not part of this run. What a record has in common with the one before,
        such as the environment, is the same object in both, so that many of them take a fraction of the memory.

        Raises:
            RecordError: as for `run` and `record`.
        """
        previous: Mapping[str, Any] = {}
        for record in self._read_records():
            previous = share_equal_values(cast("dict[str, Any]", record), previous)
            yield cast("LaunchRecord", previous)

    def _read_records(self) -> Iterator[LaunchRecord]:
        cells = self.run().cells
        if self.is_packed:
            order = {cell_id: index for index, cell_id in enumerate(cells)}
            keys = [(order[cell_id], launch) for cell_id, launch in packed_keys(self._packed_path) if cell_id in order]
            if keys == sorted(keys):  # as a published run is written: it is read a group of rows at a time
                yield from (record for record in read_packed(self._packed_path) if record["cell_id"] in order)
            else:
                planned = [record for record in read_packed(self._packed_path) if record["cell_id"] in order]
                yield from sorted(planned, key=lambda record: (order[record["cell_id"]], record["launch"]))
            return
        for cell_id in cells:
            folder = self._cells / cell_id
            names = (_LAUNCH.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
            for launch in sorted(int(name[1]) for name in names if name):
                record = self.record(cell_id, launch)
                if record is not None:
                    yield record

    def publish(self, folder: Path) -> Path:
        """Write the plan and the packed records into a folder, which is then a run directory, and return the records' path.

        Raises:
            RecordError: the run cannot be read, or the folder has records in `cells/`, which would hide the packed ones.
        """
        target = RunStore(folder)
        elsewhere = folder.resolve() != self.path.resolve()
        if elsewhere and any(target._cells.glob("*/launch-*.json")):
            raise RecordError(f"{folder}: its cells/ would hide the packed records; remove it or choose another folder")
        if elsewhere:
            write_text(folder / "run.json", (self.path / "run.json").read_text(encoding="utf-8"))
            if self.chain.exists():
                write_text(target.chain.path, self.chain.path.read_text(encoding="utf-8"))
            else:
                target.chain.path.unlink(missing_ok=True)  # of a run that was published here before
            if (self.path / PREDICTIONS).is_file():
                write_text(folder / PREDICTIONS, (self.path / PREDICTIONS).read_text(encoding="utf-8"))
            else:
                (folder / PREDICTIONS).unlink(missing_ok=True)
        write_packed(target._packed_path, self.records())
        return target._packed_path
