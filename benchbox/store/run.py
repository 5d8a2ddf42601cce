"""A run directory: what was planned (`run.json`) and one record for every launch that ran.

```
run.json
cells/<cell id>/launch-<n>.json     the record
cells/<cell id>/launch-<n>/         what the launch left behind: job, events, results and log of every rank
```
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from benchbox import __version__
from benchbox.errors import RecordError
from benchbox.store.files import read_json, write_json
from benchbox.store.record import SCHEMA_VERSION, check_record, check_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

Record = dict[str, Any]

_LAUNCH = re.compile(r"launch-([1-9][0-9]*)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was planned: cells are `Cell.to_dict()` by id, thresholds `Threshold.to_dict()`, measure `asdict(MeasureSpec)`."""

    name: str
    matrix_file: str  # as it was named on the command line
    matrix: Mapping[str, Any]  # resolved values
    reference: Mapping[str, Any]
    thresholds: Sequence[Mapping[str, Any]]
    measure: Mapping[str, Any]
    cells: Mapping[str, Mapping[str, Any]]
    skipped: Sequence[Mapping[str, Any]]  # {"cell": {...}, "reason": "..."}
    benchbox_version: str = __version__
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        if self.launches < 1:
            raise ValueError(f"{self.launches} launches")

    @property
    def launches(self) -> int:
        """Launches planned of every cell."""
        return int(self.measure["launches"])


class RunStore:
    """One run directory. Reading never writes, and writing is atomic, so it can be read while it is being filled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_run(self, run: Run) -> None:
        cells = [{"cell_id": cell_id, "cell": dict(cell)} for cell_id, cell in run.cells.items()]
        write_json(self.path / "run.json", {"schema_version": SCHEMA_VERSION, **asdict(run), "cells": cells})

    def run(self) -> Run:
        """What was planned.

        Raises:
            RecordError: this is not a run directory, or its `run.json` cannot be read.
        """
        path = self.path / "run.json"
        if not self.path.is_dir():
            raise RecordError(f"{self.path}: no such run directory; `benchbox run MATRIX` makes one")
        if not path.is_file():
            raise RecordError(f"{self.path}: not a run directory (it has no run.json); `benchbox run MATRIX` makes one")
        values = read_json(path)
        check_version(values, str(path))
        del values["schema_version"]
        try:
            cells = {entry["cell_id"]: entry["cell"] for entry in values.pop("cells")}
            return Run(**values, cells=cells)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path}: not what benchbox writes ({type(error).__name__}: {error})") from None

    def launch_dir(self, cell_id: str, launch: int) -> Path:
        """Where a launch keeps its job, events, rank results and logs."""
        return self.path / "cells" / cell_id / f"launch-{launch}"

    def record_path(self, cell_id: str, launch: int) -> Path:
        return self.path / "cells" / cell_id / f"launch-{launch}.json"

    def write_record(self, record: Mapping[str, Any]) -> Path:
        """Write a launch record and return its path.

        Raises:
            RecordError: it is not one.
        """
        path = self.record_path(record["cell_id"], record["launch"])
        check_record(record, str(path))
        write_json(path, record)
        return path

    def record(self, cell_id: str, launch: int) -> Record | None:
        """A launch's record, or None when the launch has none.

        Raises:
            RecordError: the file is damaged, or of a newer schema, and which.
        """
        path = self.record_path(cell_id, launch)
        if not path.is_file():
            return None
        record = read_json(path)
        check_record(record, str(path))
        if (record["cell_id"], record["launch"]) != (cell_id, launch):
            raise RecordError(
                f"{path}: holds launch {record['launch']} of cell {record['cell_id']}: it was moved or copied here"
            )
        return record

    def has_ok(self, cell_id: str, launch: int) -> bool:
        """Whether the launch has run and ended ok."""
        record = self.record(cell_id, launch)
        return record is not None and record["status"] == "ok"

    def records(self) -> Iterator[Record]:
        """Records of the planned cells, in the order of the plan, then by launch.

        What is left in the folder of cells that are no longer planned is not part of this run.

        Raises:
            RecordError: as for `run` and `record`.
        """
        for cell_id in self.run().cells:
            folder = self.path / "cells" / cell_id
            names = (_LAUNCH.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
            for launch in sorted(int(name[1]) for name in names if name):
                record = self.record(cell_id, launch)
                if record is not None:
                    yield record
