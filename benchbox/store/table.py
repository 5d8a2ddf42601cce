"""Records as a table with one row per launch."""

from __future__ import annotations

import csv
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchbox.errors import RecordError
from benchbox.registry.host_load import busy_reasons
from benchbox.registry.metrics import metrics
from benchbox.store.files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import pandas as pd

    from benchbox.registry.launch_record import LaunchRecord


_BLOCK_ROWS = 256
_OBSERVED = ("backend", "sharding", "attention_kernel", "checkpointed_modules", "trainable_numel", "total_numel")


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as one level with dotted keys: `data.kind`, `optim.lr`."""
    fields: dict[str, Any] = {}
    _flatten_into(fields, values, "")
    return fields


def _flatten_into(fields: dict[str, Any], values: Mapping[str, Any], prefix: str) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _flatten_into(fields, value, f"{prefix}{key}.")
        else:
            fields[prefix + key] = value


class LaunchTable:
    """Table with one row per launch: its cell, every metric, its error and what was observed. Unknown values are missing.

    Records are added one at a time, and are not kept: one takes a hundred times the memory of its row.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {}
        self._rows, self._has_hosts = 0, False

    def add(self, record: LaunchRecord) -> None:
        """Add the row of a launch."""
        self._has_hosts = self._has_hosts or bool(record.get("host"))
        error, observed, memory = record["error"], record["observed"], record["memory"]
        row = (
            {"cell_id": record["cell_id"], "launch": record["launch"]}
            | {key: str(value) if isinstance(value, list) else value for key, value in flatten(record["cell"]).items()}
            | {metric.name: metric.read(record) for metric in metrics().values()}
            | {"memory.source": memory["source"] if memory else None}
            | {f"observed.{key}": observed.get(key) if observed else None for key in _OBSERVED}
            | {f"error.{key}": error.get(key) if error else None for key in ("type", "message", "rank", "phase")}
            | _host_columns(record)
            | {"started_at": record["started_at"], "duration_s": record["duration_s"]}
        )
        for name in row:
            if name not in self._columns:
                self._columns[name] = [None] * self._rows
        for name, values in self._columns.items():
            values.append(row.get(name))
        self._rows += 1

    def frame(self) -> pd.DataFrame:
        """Return the table."""
        import pandas as pd

        columns = {name: values for name, values in self._columns.items() if self._has_hosts or not name.startswith("host.")}
        frame = pd.DataFrame(columns).convert_dtypes()
        numbers = [metric.name for metric in metrics().values() if metric.is_number and metric.name in frame]
        # A column without any value (reserved bytes on a CPU) stays numeric.
        return frame.astype(dict.fromkeys(numbers, "Float64"))

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `table.csv` and `table.parquet` into a folder, atomically, and return their paths."""
        frame = self.frame()
        csv, parquet = folder / "table.csv", folder / "table.parquet"
        with atomic_file(csv) as stream:
            frame.to_csv(stream, index=False)
        with atomic_file(parquet) as stream:
            frame.to_parquet(stream, index=False)
        return csv, parquet


def launch_table(records: Iterable[LaunchRecord]) -> pd.DataFrame:
    """Return the table of records: see `LaunchTable`."""
    table = LaunchTable()
    for record in records:
        table.add(record)
    return table.frame()


def _host_columns(record: LaunchRecord) -> dict[str, Any]:
    state = record.get("host")
    shares = [host["other_cpu_share"] for host in state["hosts"] if host["other_cpu_share"] is not None] if state else []
    return {
        "host.busy": "; ".join(busy_reasons(record)) if state else None,
        "host.other_cpu_share": max(shares, default=None),
        "host.energy_j_per_sample": state["energy_j_per_sample"] if state else None,
    }


class TableReader:
    """Rows of a table that `LaunchTable.write` wrote, compared with records one at a time; columns that it lacks do not count.

    Rows are read as far as the one of the record, and only those that were passed over are kept: none, if the records come in
    the order of the table.
    """

    def __init__(self, path: Path) -> None:
        self._rows = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
        self._passed: dict[tuple[str, int], dict[str, Any]] = {}

    def differences(self, record: LaunchRecord) -> list[str]:
        """Return how the row of a record differs from it, one line per value.

        Raises:
            RecordError: the file cannot be read as a table.
        """
        key, where = (record["cell_id"], record["launch"]), f"launch {record['launch']} of {record['cell_id']}"
        while key not in self._passed and (row := next(self._rows, None)) is not None:
            self._passed[row["cell_id"], row["launch"]] = row
        row = self._passed.pop(key, None)
        if row is None:
            return [f"no row of {where}"]
        return [
            f"{name} of {where} is {row[name]}, its record has {value}"
            for name, value in _table_values(record).items()
            if name in row and not _is_same(row[name], value)
        ]

    def rows_without_record(self) -> list[str]:
        """Return one line for each row whose record was not compared. Raises RecordError as `differences`."""
        keys = [*self._passed, *((row["cell_id"], row["launch"]) for row in self._rows)]
        return [f"no record of launch {launch} of {cell_id}" for cell_id, launch in keys]


def _read_csv(path: Path) -> Iterator[dict[str, Any]]:
    with _reading(path), path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            values = {name: text or None for name, text in row.items()}
            yield {**values, "cell_id": row["cell_id"], "launch": int(row["launch"])}


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with _reading(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BLOCK_ROWS):
            yield from ({**row, "cell_id": row["cell_id"], "launch": int(row["launch"])} for row in batch.to_pylist())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise RecordError(f"{path}: not a table of launches ({type(error).__name__}: {error})") from None


def _table_values(record: LaunchRecord) -> dict[str, Any]:
    """Return the columns of a record that are numbers or words."""
    observed = record["observed"]
    return (
        {key: value for key, value in flatten(record["cell"]).items() if not isinstance(value, list)}
        | {metric.name: metric.read(record) for metric in metrics().values()}
        | {f"observed.{key}": observed.get(key) if observed else None for key in _OBSERVED}
        | {"started_at": record["started_at"], "duration_s": record["duration_s"]}
    )


def _is_same(cell: Any, value: Any) -> bool:
    if value is None or cell is None:
        return value is cell
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(cell) == str(value)
    return math.isclose(float(cell), value, rel_tol=1e-9)
