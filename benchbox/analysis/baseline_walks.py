"""Walks in a baseline: the batches that it has at one point of the other axes, and the fastest of them by its own launches."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from benchbox.analysis.walk import walk_point
from benchbox.errors import RecordError
from benchbox.spec.cell import Cell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.store.baseline import Baseline


def baseline_walks(baseline: Baseline) -> dict[str, dict[int, str]]:
    """Return the ids of a baseline's cells by point of the other axes (see `resolved_point`), then by batch.

    Batches that ran out of memory are no cells of a baseline, so the largest one here is the largest that fitted.
    """
    walks: dict[str, dict[int, str]] = defaultdict(dict)
    for cell_id, entry in baseline.cells.items():
        try:
            walks[resolved_point(entry["cell"])][entry["cell"]["batch"]] = cell_id
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise RecordError(f"the baseline of {baseline.matrix} has a malformed cell, {cell_id} ({problem})") from None
    return dict(walks)


def resolved_point(cell: Mapping[str, Any]) -> str:
    """Return the `walk_point` of a cell, also of one that an older benchbox wrote, which lacks fields added later."""
    return walk_point(Cell.from_dict(dict(cell)).to_dict())


def fastest_batch(baseline: Baseline, batches: Mapping[int, str]) -> int | None:
    """Return the batch that was fastest in its first launch, as a walk chooses it; None where no launches are known."""
    launches = {batch: baseline.by_launch(cell_id, "global_samples_per_s") for batch, cell_id in batches.items()}
    first = {batch: values[min(values)] for batch, values in launches.items() if values}
    return max(sorted(first), key=lambda batch: first[batch], default=None)
