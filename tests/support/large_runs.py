"""Runs of any number of cells, made of the published records of `reports/policies_full`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.spec.cell import Cell
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import Run

PUBLISHED = Path(__file__).parents[2] / "reports/policies_full"


def published_cells(count: int) -> tuple[Run, list[LaunchRecord]]:
    """Return a run of `count` cells and their records: the measured ones, repeated with further seeds and so further ids."""
    store = RunStore(PUBLISHED)
    run, published = store.run(), list(store.records())
    cells, records = {}, []
    for number in range(count):
        record = published[number % len(published)]
        cell = replace(Cell.from_dict(record["cell"]), seed=number // len(published))
        cells[cell.cell_id] = cell.to_dict()
        records.append(record | {"cell_id": cell.cell_id, "cell": cell.to_dict(), "config": cell.to_dict()})
    return replace(run, cells=cells), records
