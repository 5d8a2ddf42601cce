"""Records as a table: one row a launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from benchbox.registry.metrics import METRICS

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


_OBSERVED = ("backend", "sharding", "attention_kernel", "checkpointed_modules", "trainable_numel", "total_numel")


def flat(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The cell's fields on one level: `data.kind`, `optim.lr`."""
    fields: dict[str, Any] = {}
    for key, value in cell.items():
        if isinstance(value, Mapping):
            fields |= {f"{key}.{inner}": item for inner, item in flat(value).items()}
        else:
            fields[key] = value
    return fields


def table(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a launch: what the cell was, every metric, how it ended, what was observed. Unknown values are missing."""
    import pandas as pd

    rows = []
    for record in records:
        error = record["error"] or {}
        observed = record["observed"] or {}
        memory = record["memory"] or {}
        rows.append(
            {"cell_id": record["cell_id"], "launch": record["launch"]}
            | {key: str(value) if isinstance(value, list) else value for key, value in flat(record["cell"]).items()}
            | {metric.name: metric.read(record) for metric in METRICS.values()}
            | {"memory.source": memory.get("source")}
            | {f"observed.{key}": observed.get(key) for key in _OBSERVED}
            | {f"error.{key}": error.get(key) for key in ("type", "message", "rank", "phase")}
            | {"started_at": record["started_at"], "duration_s": record["duration_s"]}
        )
    frame = pd.DataFrame(rows).convert_dtypes()
    numbers = [metric.name for metric in METRICS.values() if metric.is_number and metric.name in frame]
    # A column nobody could measure (reserved bytes on a CPU) stays a column of numbers.
    return frame.astype(dict.fromkeys(numbers, "Float64"))


def write_tables(records: Iterable[Mapping[str, Any]], folder: Path) -> tuple[Path, Path]:
    """Write `table.csv` and `table.parquet` into a folder and return their paths."""
    frame = table(records)
    csv, parquet = folder / "table.csv", folder / "table.parquet"
    frame.to_csv(csv, index=False)
    frame.to_parquet(parquet, index=False)
    return csv, parquet
