"""Records as a table with one row per launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from benchbox.registry.host_load import busy_reasons
from benchbox.registry.metrics import metrics
from benchbox.store.files import atomic_file

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from benchbox.registry.launch_record import LaunchRecord


_OBSERVED = ("backend", "sharding", "attention_kernel", "checkpointed_modules", "trainable_numel", "total_numel")


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as one level with dotted keys: `data.kind`, `optim.lr`."""
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            fields |= {f"{key}.{inner}": item for inner, item in flatten(value).items()}
        else:
            fields[key] = value
    return fields


def launch_table(records: Iterable[LaunchRecord]) -> pd.DataFrame:
    """Return one row per launch: its cell, every metric, its error and what was observed. Unknown values are missing."""
    import pandas as pd

    records = list(records)
    with_host = any(record.get("host") for record in records)
    rows = []
    for record in records:
        error, observed, memory = record["error"], record["observed"], record["memory"]
        rows.append(
            {"cell_id": record["cell_id"], "launch": record["launch"]}
            | {key: str(value) if isinstance(value, list) else value for key, value in flatten(record["cell"]).items()}
            | {metric.name: metric.read(record) for metric in metrics().values()}
            | {"memory.source": memory["source"] if memory else None}
            | {f"observed.{key}": observed.get(key) if observed else None for key in _OBSERVED}
            | {f"error.{key}": error.get(key) if error else None for key in ("type", "message", "rank", "phase")}
            | (_host_columns(record) if with_host else {})
            | {"started_at": record["started_at"], "duration_s": record["duration_s"]}
        )
    frame = pd.DataFrame(rows).convert_dtypes()
    numbers = [metric.name for metric in metrics().values() if metric.is_number and metric.name in frame]
    # A column without any value (reserved bytes on a CPU) stays numeric.
    return frame.astype(dict.fromkeys(numbers, "Float64"))


def _host_columns(record: LaunchRecord) -> dict[str, Any]:
    state = record.get("host")
    shares = [host["other_cpu_share"] for host in state["hosts"] if host["other_cpu_share"] is not None] if state else []
    return {
        "host.busy": "; ".join(busy_reasons(record)) if state else None,
        "host.other_cpu_share": max(shares, default=None),
        "host.energy_j_per_sample": state["energy_j_per_sample"] if state else None,
    }


def write_tables(records: Iterable[LaunchRecord], folder: Path) -> tuple[Path, Path]:
    """Write `table.csv` and `table.parquet` into a folder, atomically, and return their paths."""
    frame = launch_table(records)
    csv, parquet = folder / "table.csv", folder / "table.parquet"
    with atomic_file(csv) as stream:
        frame.to_csv(stream, index=False)
    with atomic_file(parquet) as stream:
        frame.to_parquet(stream, index=False)
    return csv, parquet
