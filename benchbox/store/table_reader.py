"""Tables of launches, read beside the records that they were written from."""

from __future__ import annotations

import csv
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchbox.errors import RecordError
from benchbox.registry.metrics import metrics
from benchbox.store.table import OBSERVED, flatten

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord

_BLOCK_ROWS = 256


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
        | {f"observed.{key}": observed.get(key) if observed else None for key in OBSERVED}
        | {"started_at": record["started_at"], "duration_s": record["duration_s"]}
    )


def _is_same(cell: Any, value: Any) -> bool:
    if value is None or cell is None:
        return value is cell
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(cell) == str(value)
    return math.isclose(float(cell), value, rel_tol=1e-9)
