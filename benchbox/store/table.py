"""Records as a table with one row per launch."""

from __future__ import annotations

import csv
import json
import tempfile
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Self

from benchbox.errors import RecordError, reason_of
from benchbox.registry.host_load import busy_reasons
from benchbox.registry.metrics import metrics
from benchbox.store.files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import pandas as pd
    import pyarrow as pa

    from benchbox.registry.launch_record import LaunchRecord


_GROUP_ROWS = 256  # of a Parquet file
_SPOOLED_BYTES = 2**16  # in memory; what is beyond goes to a temporary file
# By Arrow type: those that have missing values.
_PANDAS_DTYPES = {"bool": "boolean", "int64": "Int64", "double": "Float64", "string": "string"}
OBSERVED = ("backend", "sharding", "attention_kernel", "checkpointed_modules", "trainable_numel", "total_numel")


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

    Records are added one at a time. Neither they nor their rows are kept in memory, whose need does not grow with their number.
    """

    def __init__(self) -> None:
        self._types: dict[str, set[type]] = {}  # of the values of each column
        self._has_hosts = False
        # One JSON list a line, in the order of `_types`. Rows lack the columns that later ones have added.
        self._rows: IO[str] = tempfile.SpooledTemporaryFile(_SPOOLED_BYTES, "w+", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def add(self, record: LaunchRecord) -> None:
        """Add the row of a launch."""
        self._has_hosts = self._has_hosts or bool(record.get("host"))
        row = _row(record)
        for name, value in row.items():
            types = self._types.setdefault(name, set())
            if value is not None:
                types.add(type(value))
        self._rows.write(json.dumps([row.get(name) for name in self._types]) + "\n")

    def frame(self) -> pd.DataFrame:
        """Return the table, in memory."""
        import pyarrow as pa

        return pa.Table.from_batches(self._groups(), self._schema()).to_pandas()

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `table.csv` and `table.parquet` into a folder, atomically, and return their paths."""
        import pyarrow.parquet as pq

        csv_path, parquet_path, schema = folder / "table.csv", folder / "table.parquet", self._schema()
        with atomic_file(csv_path) as stream:
            writer = csv.writer(_Lines(stream))
            writer.writerow(schema.names)
            writer.writerows(self._values(schema))
        with atomic_file(parquet_path) as stream, pq.ParquetWriter(stream, schema) as file:
            for group in self._groups():
                file.write_batch(group)
        return csv_path, parquet_path

    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        # A column without any value (reserved bytes on a CPU) stays numeric.
        numbers = {metric.name for metric in metrics().values() if metric.is_number}
        types = {
            name: pa.float64() if name in numbers else _arrow_type(types)
            for name, types in self._types.items()
            if self._has_hosts or not name.startswith("host.")
        }
        columns = [
            {"name": name, "field_name": name, "pandas_type": "", "numpy_type": _PANDAS_DTYPES[str(type_)], "metadata": None}
            for name, type_ in types.items()
        ]
        # How pandas restores the dtypes of a file: https://pandas.pydata.org/docs/development/developer.html
        metadata = {"pandas": json.dumps({"index_columns": [], "column_indexes": [], "columns": columns})}
        return pa.schema(types.items(), metadata)

    def _values(self, schema: pa.Schema) -> Iterator[list[Any]]:
        """Yield the values of each row."""
        names = list(self._types)
        shown = [(names.index(field.name), str(field.type) == "string") for field in schema]
        self._rows.seek(0)
        for line in self._rows:
            row = json.loads(line)
            row += [None] * (len(names) - len(row))
            yield [_text(row[index]) if is_text and row[index] is not None else row[index] for index, is_text in shown]

    def _groups(self) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        schema = self._schema()
        rows = self._values(schema)
        while columns := list(zip(*islice(rows, _GROUP_ROWS), strict=True)):
            arrays = [_array(values, field) for values, field in zip(columns, schema, strict=True)]
            del columns  # before those of the next group are read
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Iterable[Any], field: pa.Field) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(values, field.type)
    except (OverflowError, pa.ArrowInvalid) as error:  # of integers beyond 2^53 or 2^63
        raise RecordError(f"{field.name}: a number that no launch can have ({reason_of(error)})") from None


class _Lines:
    """Rows of `csv.writer`, ended by line feeds.

    By default they end in a carriage return and a line feed, and it is those that `csv` quotes within values: with a line feed
    alone, the output of a progress bar in an error would end a row.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, row: str) -> None:
        self._stream.write(row.removesuffix("\r\n").encode() + b"\n")


def _text(value: Any) -> str:
    """Return a value as text; what is no character, such as a byte of a path that is not UTF-8, becomes an escape."""
    return str(value).encode(errors="backslashreplace").decode()


def _arrow_type(types: set[type]) -> pa.DataType:
    import pyarrow as pa

    if types == {bool}:
        return pa.bool_()
    if types == {int}:
        return pa.int64()
    return pa.float64() if types and types <= {int, float} else pa.string()


def launch_table(records: Iterable[LaunchRecord]) -> pd.DataFrame:
    """Return the table of records: see `LaunchTable`."""
    with LaunchTable() as table:
        for record in records:
            table.add(record)
        return table.frame()


def _row(record: LaunchRecord) -> dict[str, Any]:
    error, observed, memory = record["error"], record["observed"], record["memory"]
    return (
        {"cell_id": record["cell_id"], "launch": record["launch"]}
        | {key: str(value) if isinstance(value, list) else value for key, value in flatten(record["cell"]).items()}
        | {metric.name: metric.read(record) for metric in metrics().values()}
        | {"memory.source": memory["source"] if memory else None}
        | {f"observed.{key}": observed.get(key) if observed else None for key in OBSERVED}
        | {f"error.{key}": error.get(key) if error else None for key in ("type", "message", "rank", "phase")}
        | _host_columns(record)
        | {"started_at": record["started_at"], "duration_s": record["duration_s"]}
    )


def _host_columns(record: LaunchRecord) -> dict[str, Any]:
    state = record.get("host")
    shares = [host["other_cpu_share"] for host in state["hosts"] if host["other_cpu_share"] is not None] if state else []
    return {
        "host.busy": "; ".join(busy_reasons(record)) if state else None,
        "host.other_cpu_share": max(shares, default=None),
        "host.energy_j_per_sample": state["energy_j_per_sample"] if state else None,
    }
