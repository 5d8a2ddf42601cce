"""Predictions of a run, `predictions.json`: what theory says of each cell, beside the records of what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from benchbox import __version__
from benchbox.errors import RecordError
from benchbox.store.files import read_json, write_json
from benchbox.store.json_types import type_problem
from benchbox.store.record import SCHEMA_VERSION, check_version

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE = "predictions.json"


class TrafficPrediction(TypedDict):
    """Calls and bytes of one collective in one step of a rank."""

    count: int
    bytes: int


class CellPrediction(TypedDict):
    """Prediction for a cell: `benchbox.theory.prediction.Estimate`, of the rank that needs most."""

    peak_bytes: int
    moment: str  # the phase of the peak
    components: dict[str, int]
    resident_bytes: int
    logits_bytes: int
    collectives: dict[str, TrafficPrediction]
    model_flops: int
    recomputed_flops: int
    optimizer_bytes: int
    world_size: int
    total_numel: int
    notes: list[str]
    # absent in older files
    collectives_by_ranks: NotRequired[dict[str, dict[str, TrafficPrediction]]]
    smallest_step_flops: NotRequired[int | None]
    has_size_of_step: NotRequired[bool]


class _PredictionsFile(TypedDict):
    schema_version: int
    benchbox_version: str
    predictions: dict[str, CellPrediction]
    unknown: dict[str, str]  # cell without a prediction: why


def write_predictions(folder: Path, predictions: Mapping[str, Mapping[str, Any]], unknown: Mapping[str, str]) -> Path:
    """Write the predictions of a run by cell id, and why other cells have none, and return the path."""
    path = folder / FILE
    write_json(
        path,
        {
            "schema_version": SCHEMA_VERSION,
            "benchbox_version": __version__,
            "predictions": dict(predictions),
            "unknown": dict(unknown),
        },
    )
    return path


def read_predictions(folder: Path) -> dict[str, CellPrediction]:
    """Return the predictions of a run by cell id; none where nothing was estimated.

    Raises:
        RecordError: the file is damaged, or of a newer benchbox.
    """
    values = _read(folder)
    return {} if values is None else values["predictions"]


def read_unpredicted(folder: Path) -> dict[str, str]:
    """Return why cells of a run have no prediction, by cell id.

    Raises:
        RecordError: as for `read_predictions`.
    """
    values = _read(folder)
    return {} if values is None else values["unknown"]


def _read(folder: Path) -> _PredictionsFile | None:
    path = folder / FILE
    if not path.is_file():
        return None
    values: Any = read_json(path)
    check_version(values, str(path))
    if problem := type_problem(values, _PredictionsFile):
        raise RecordError(f"{path}: not what benchbox writes ({problem}); `benchbox estimate {folder}` writes it anew")
    checked: _PredictionsFile = values
    return checked
