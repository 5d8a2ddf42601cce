"""All records of a run in one file, `records.parquet`: compact enough to publish, and lossless.

One row per launch with the columns `cell_id`, `launch`, `status` and `record`, the complete record as JSON text. Key order,
numbers and nulls are read back exactly as they were in the launch's own JSON file.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from benchbox.errors import RecordError, reason_of
from benchbox.store.files import atomic_file
from benchbox.store.record import check_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord

_GROUP_ROWS = 256  # launches, a few megabytes of text: files of many launches are never in memory as a whole
_REMEDY = "restore the file, or publish the run again"


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("cell_id", pa.string()), ("launch", pa.int64()), ("status", pa.string()), ("record", pa.string())])


def write_packed(path: Path, records: Iterable[LaunchRecord]) -> None:
    """Write records into one Parquet file, atomically, a group of rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    with (
        atomic_file(path) as stream,
        # Records resemble one another: one large page in each group lets the compression see that. Every text is distinct.
        pq.ParquetWriter(
            stream,
            schema,
            compression="zstd",
            compression_level=19,
            use_dictionary=False,
            data_page_size=2**30,
            write_page_checksum=True,
        ) as writer,
    ):
        for group in _groups(records):
            writer.write_table(pa.Table.from_pylist(group, schema=schema), row_group_size=len(group))


def _groups(records: Iterable[LaunchRecord]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of records in groups."""
    rows = (
        {
            "cell_id": record["cell_id"],
            "launch": record["launch"],
            "status": record["status"],
            "record": json.dumps(record, separators=(",", ":")),
        }
        for record in records
    )
    while group := list(islice(rows, _GROUP_ROWS)):
        yield group


def read_packed(path: Path) -> Iterator[LaunchRecord]:
    """Yield the records in a file that `write_packed` wrote, in its order.

    Raises:
        RecordError: the file is damaged, or was not written by benchbox.
    """
    keys: set[tuple[str, int]] = set()
    for number, row in enumerate(_rows(path), start=1):
        record = _record(row, f"{path}: row {number}")
        key = (record["cell_id"], record["launch"])
        if key in keys:
            raise RecordError(f"{path}: row {number}: launch {key[1]} of cell {key[0]} is there twice; {_REMEDY}")
        keys.add(key)
        yield record


def packed_keys(path: Path) -> list[tuple[str, int]]:
    """Return the cell id and the launch of every record, in the order of the file, without reading the records.

    Raises:
        RecordError: as `read_packed`.
    """
    return [(row["cell_id"], row["launch"]) for row in _rows(path, ["cell_id", "launch"])]


def _rows(path: Path, only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not file.schema_arrow.equals(_schema()):
                columns = ", ".join(f"{field.name!r} {field.type}" for field in file.schema_arrow)
                raise RecordError(f"{path}: not records of benchbox: its columns are {columns:.200}; {_REMEDY}")
            missing = file.metadata.num_rows
            for batch in file.iter_batches(_GROUP_ROWS, columns=only):
                missing -= batch.num_rows
                yield from batch.to_pylist()
            if missing:  # pages have checksums, and the list of groups has none
                raise RecordError(f"{path}: {missing} rows of those it names are missing; {_REMEDY}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as Parquet ({reason_of(error)}); {_REMEDY}") from None


def _record(row: dict[str, Any], where: str) -> LaunchRecord:
    try:
        record = json.loads(row["record"])
    except (TypeError, ValueError):
        raise RecordError(f"{where}: the record is not JSON; {_REMEDY}") from None
    if not isinstance(record, dict):
        raise RecordError(f"{where}: the record is a JSON {type(record).__name__}, and an object is expected; {_REMEDY}")
    check_record(record, where, _REMEDY)
    for key in ("cell_id", "launch", "status"):
        if record[key] != row[key]:
            raise RecordError(f"{where}: the record has {key} {record[key]!r}, and its row {row[key]!r}; {_REMEDY}")
    return cast("LaunchRecord", record)
