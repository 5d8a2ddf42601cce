"""All records of a run in one file, `records.parquet`: compact enough to publish, and lossless.

One row per launch with the columns `cell_id`, `launch`, `status` and `record`, the complete record as JSON text. Key order,
numbers and nulls are read back exactly as they were in the launch's own JSON file.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from benchbox.errors import RecordError
from benchbox.store.files import atomic_file
from benchbox.store.record import check_record, share_equal_values

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord

_REMEDY = "restore the file, or publish the run again"


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("cell_id", pa.string()), ("launch", pa.int64()), ("status", pa.string()), ("record", pa.string())])


def write_packed(path: Path, records: Iterable[LaunchRecord]) -> None:
    """Write records into one Parquet file, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "cell_id": record["cell_id"],
            "launch": record["launch"],
            "status": record["status"],
            "record": json.dumps(record, separators=(",", ":")),
        }
        for record in records
    ]
    with atomic_file(path) as stream:
        # Records resemble one another: one large page lets the compression see that. Every text is distinct.
        pq.write_table(
            pa.Table.from_pylist(rows, schema=_schema()),
            stream,
            compression="zstd",
            compression_level=19,
            use_dictionary=False,
            data_page_size=2**30,
            write_page_checksum=True,
        )


def read_packed(path: Path) -> dict[tuple[str, int], LaunchRecord]:
    """Read the records in a file that `write_packed` wrote.

    Returns:
        Records by cell id and launch, in the order of the file.

    Raises:
        RecordError: the file is damaged, or was not written by benchbox.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not file.schema_arrow.equals(_schema()):
                columns = ", ".join(f"{field.name!r} {field.type}" for field in file.schema_arrow)
                raise RecordError(f"{path}: not records of benchbox: its columns are {columns:.200}; {_REMEDY}")
            rows = file.read().to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecordError(f"{path}: cannot be read as Parquet ({reason}); {_REMEDY}") from None
    records: dict[tuple[str, int], LaunchRecord] = {}
    previous: dict[str, Any] = {}
    for number, row in enumerate(rows, start=1):
        record = _record(row, f"{path}: row {number}")
        key = (record["cell_id"], record["launch"])
        if key in records:
            raise RecordError(f"{path}: row {number}: launch {key[1]} of cell {key[0]} is there twice; {_REMEDY}")
        previous = share_equal_values(cast("dict[str, Any]", record), previous)
        records[key] = record
    return records


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
