"""Predictions of several cells, as the verbs `estimate`, `plan` and `run` need them."""

import os
import signal
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


def predict_largest_batches(
    cells: Iterable["Cell"],
    policy_dirs: Sequence[Path],
    *,
    limit_bytes: int | None,
    at_most: int | None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Mapping[str, int | str]:
    """Return the largest batch that theory says fits at the point of each cell, by cell id, or why there is no prediction."""
    from dataclasses import replace

    from benchbox.errors import BenchboxError
    from benchbox.estimation import Estimator
    from benchbox.theory.largest_batch import largest_batch

    cells = list(cells)
    if limit_bytes is None:
        return {cell.cell_id: "the memory of the device is unknown" for cell in cells}
    estimator = Estimator(policy_dirs, device)
    predictions: dict[str, int | str] = {}
    for cell in cells:

        def peak_bytes(batch: int, cell: "Cell" = cell) -> int:
            return estimator.estimate(replace(cell, batch=batch)).peak_bytes

        try:
            predictions[cell.cell_id] = largest_batch(peak_bytes, limit_bytes, at_most=at_most)
        except BenchboxError as error:
            predictions[cell.cell_id] = str(error).strip().splitlines()[0]
    return predictions


def predict_in_process(
    cells: Sequence["Cell"], policy_dirs: Sequence[Path], limit_bytes: int | None, at_most: int | None
) -> "Mapping[str, int | str]":
    """Return the predictions of `predict_largest_batches`, made in a process of its own.

    torch sets environment variables when it is imported, and takes memory: neither may reach the ranks that are measured.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from benchbox.launch.capacity import device_memory_bytes
    from benchbox.launch.process.environment import has_cuda_device

    device: Literal["cpu", "cuda"] = "cpu"
    if has_cuda_device(os.environ):
        device, total = "cuda", device_memory_bytes()
        limit_bytes = min((size for size in (limit_bytes, total) if size is not None), default=None)
    ignore_interrupts = (signal.SIGINT, signal.SIG_IGN)  # this process handles them
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=signal.signal, initargs=ignore_interrupts) as processes:
        prediction = processes.submit(
            predict_largest_batches, cells, policy_dirs, limit_bytes=limit_bytes, at_most=at_most, device=device
        )
        return prediction.result()


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
