"""Predictions of several cells, as the verbs `estimate`, `plan` and `run` need them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchbox.spec.cell import Cell
    from benchbox.theory.prediction import Estimate

Predictions = Mapping[str, "Estimate | str"]  # by cell id; a reason where there is none


def predict_cells(cells: Iterable["Cell"], policy_dirs: Sequence[Path], device: Literal["cpu", "cuda"] = "cpu") -> Predictions:
    """Return the prediction for each cell, or why there is none. Imports torch, and starts nothing."""
    from benchbox.errors import BenchboxError
    from benchbox.estimation import Estimator

    estimator = Estimator(policy_dirs, device)
    predictions: dict[str, Estimate | str] = {}
    for cell in cells:
        try:
            predictions[cell.cell_id] = estimator.estimate(cell)
        except BenchboxError as error:
            predictions[cell.cell_id] = str(error)
    return predictions


def predict_run(folder: Path, policy_dirs: Sequence[Path]) -> Path:
    """Write `predictions.json` into a run directory: those for its planned cells, on the device that its launches observed."""
    from benchbox.spec.cell import Cell
    from benchbox.store.predictions import write_predictions
    from benchbox.store.run import RunStore
    from benchbox.theory.prediction import Estimate

    store = RunStore(folder)
    cells = [Cell.from_dict(dict(cell)) for cell in store.run().cells.values()]
    sources = {record["memory"]["source"] for record in store.records() if record["memory"]}
    predictions = predict_cells(cells, policy_dirs, "cuda" if "torch.cuda" in sources else "cpu")
    return write_predictions(
        folder,
        {cell_id: entry.to_dict() for cell_id, entry in predictions.items() if isinstance(entry, Estimate)},
        {cell_id: entry for cell_id, entry in predictions.items() if isinstance(entry, str)},
    )
