"""Predictions of several cells, as the verbs `estimate`, `plan` and `run` need them."""

import atexit
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from benchbox.errors import BenchboxError
from benchbox.worker.parent import signal_on_parent_death

if TYPE_CHECKING:
    from benchbox.spec.cell import Cell
    from benchbox.theory.prediction import Estimate

T = TypeVar("T")
Predictions = Mapping[str, "Estimate | str"]  # by cell id; a reason where there is none


class PredictionFailure(str):
    """Reason why there is no prediction, of an error that nobody foresaw: a bug of benchbox or of the policy."""

    __slots__ = ()


def check_predicted(entries: Iterable["Estimate | int | str"]) -> None:
    """Raise BenchboxError, with the exit code of an internal error, if a prediction failed as nobody foresaw."""
    entries = list(entries)
    failures = [entry for entry in entries if isinstance(entry, PredictionFailure)]
    if failures:
        raise BenchboxError(f"{len(failures)} of {len(entries)} predictions failed: {failures[0]}")


def local_device() -> Literal["cpu", "cuda"]:
    """Return what ranks on this machine would run on."""
    from benchbox.launch.process.environment import has_cuda_device

    return "cuda" if has_cuda_device(os.environ) else "cpu"


def predict_cells(
    cells: Iterable["Cell"],
    policy_dirs: Sequence[Path],
    step: int | None,
    device: Literal["cpu", "cuda"] = "cpu",
    notify: Callable[[int], None] = lambda _: None,
) -> Predictions:
    """Return the prediction for a step of each cell, or why there is none, whatever happens to it.

    Those in the user's cache are read, and the others are made in a process of their own.

    Args:
        step: see `Estimator.estimate`.
        notify: is called with the number of cells whose prediction takes a trace.
    """
    from benchbox.cli.prediction_cache import PredictionCache

    cells, cache = list(cells), PredictionCache(policy_dirs, step, device)
    predictions: dict[str, Estimate | str] = {}
    missing = []
    for cell in cells:
        try:
            prediction = cache.read(cell)
        except BenchboxError:  # its policy is not found: the reason is given where it is looked for again
            prediction = None
        if prediction is None:
            missing.append(cell)
        else:
            predictions[cell.cell_id] = prediction
    if missing:
        notify(len(missing))
        try:
            predictions |= _in_process(_trace_cells, missing, policy_dirs, step, device)
        except Exception as error:  # noqa: BLE001 (as when memory ends: a prediction never ends a run)
            predictions |= {cell.cell_id: _process_failure(error) for cell in missing}
    return {cell.cell_id: predictions[cell.cell_id] for cell in cells}


def _trace_cells(
    cells: Sequence["Cell"], policy_dirs: Sequence[Path], step: int | None, device: Literal["cpu", "cuda"]
) -> Predictions:
    """Return predictions that are not in the cache, and write them into it."""
    estimator = _CachedEstimator(policy_dirs, step, device)
    predictions: dict[str, Estimate | str] = {}
    for cell in cells:
        try:
            predictions[cell.cell_id] = estimator.estimate(cell)
        except BenchboxError as error:
            predictions[cell.cell_id] = str(error)
        except Exception as error:  # noqa: BLE001 (a prediction never ends a run)
            predictions[cell.cell_id] = _estimate_failure(error)
    return predictions


class _CachedEstimator:
    """Estimates a step of cells, through the user's cache. Imports torch."""

    def __init__(self, policy_dirs: Sequence[Path], step: int | None, device: Literal["cpu", "cuda"]) -> None:
        from benchbox.cli.prediction_cache import PredictionCache
        from benchbox.estimation import Estimator

        self._cache, self._estimator = PredictionCache(policy_dirs, step, device), Estimator(policy_dirs, device)
        self._step = step

    def estimate(self, cell: "Cell") -> "Estimate":
        prediction = self._cache.read(cell)
        if prediction is None:
            prediction = self._estimator.estimate(cell, self._step)
            self._cache.write(cell, prediction)
        return prediction


def _find_largest_batches(
    cells: Sequence["Cell"],
    policy_dirs: Sequence[Path],
    step: int,
    limit_bytes: int,
    at_most: int | None,
    device: Literal["cpu", "cuda"],
) -> Mapping[str, int | str]:
    from dataclasses import replace

    from benchbox.theory.largest_batch import largest_batch

    estimator = _CachedEstimator(policy_dirs, step, device)
    predictions: dict[str, int | str] = {}
    for cell in cells:

        def peak_bytes(batch: int, cell: "Cell" = cell) -> int:
            return estimator.estimate(replace(cell, batch=batch)).peak_bytes

        try:
            predictions[cell.cell_id] = largest_batch(peak_bytes, limit_bytes, at_most=at_most)
        except BenchboxError as error:
            predictions[cell.cell_id] = str(error).strip().splitlines()[0]
        except Exception as error:  # noqa: BLE001 (a prediction never ends a run)
            predictions[cell.cell_id] = _estimate_failure(error)
    return predictions


def rank_limit_bytes(memory_limit: int | None) -> int | None:
    """Return the memory of a rank on this machine: `measure.memory_limit` or that of the GPU; None if neither is known."""
    from benchbox.launch.capacity import device_memory_bytes

    total = device_memory_bytes() if local_device() == "cuda" else None
    return min((size for size in (memory_limit, total) if size is not None), default=None)


def predict_largest_batches(
    cells: Sequence["Cell"],
    policy_dirs: Sequence[Path],
    step: int,
    limit_bytes: int | None,
    at_most: int | None,
    device: Literal["cpu", "cuda"] | None = None,
) -> Mapping[str, int | str]:
    """Return the largest batch that theory says fits at the point of each cell, by cell id, or why there is no prediction.

    They are made in a process of their own, whatever happens to it.

    Args:
        limit_bytes: of a rank, see `rank_limit_bytes`.
        device: by default that of this machine.
    """
    if limit_bytes is None:
        return {cell.cell_id: "the memory of the device is unknown" for cell in cells}
    try:
        return _in_process(_find_largest_batches, cells, policy_dirs, step, limit_bytes, at_most, device or local_device())
    except Exception as error:  # noqa: BLE001 (a prediction never ends a run)
        return {cell.cell_id: _process_failure(error) for cell in cells}


def _process_failure(error: Exception) -> str:
    from concurrent.futures.process import BrokenProcessPool

    if isinstance(error, (BrokenProcessPool, MemoryError)):
        return "the process that predicts was killed, or ran out of memory"
    return PredictionFailure(f"the process that predicts failed: {type(error).__name__}: {error}")


def _estimate_failure(error: Exception) -> PredictionFailure:
    return PredictionFailure(f"the estimate failed: {type(error).__name__}: {error}")


def _in_process(function: Callable[..., T], *arguments: Any) -> T:
    """Return what a function returns, called in a new process.

    torch sets environment variables when it is imported, and takes memory: neither may reach the ranks that are measured.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin_process) as processes:
        try:
            return processes.submit(function, *arguments).result()
        except BaseException:  # an interrupt would wait for all that is left to predict
            for process in list((processes._processes or {}).values()):  # noqa: SLF001 (public from Python 3.14 on)
                process.terminate()
            raise


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits handles interrupts
    signal_on_parent_death(signal.SIGKILL)  # killed, it leaves nobody to read the predictions
    atexit.register(os._exit, 0)  # after the results were sent: finalizing an interpreter with torch takes a second


def predict_run(folder: Path, policy_dirs: Sequence[Path], notify: Callable[[int], None] = lambda _: None) -> Predictions:
    """Write `predictions.json` into a run directory, on the device that its launches observed, and return what is in it.

    Batches beyond the largest that fits have none, nor have cells that have not run: they were not measured.
    """
    from benchbox.analysis.summary import summarize
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.predictions import write_predictions
    from benchbox.store.run import RunStore
    from benchbox.theory.prediction import Estimate

    store = RunStore(folder)
    run = store.run()
    summaries = summarize(run, store.records())
    cells = [Cell.from_dict(dict(summary.cell)) for summary in summaries if summary.records and not summary.beyond_memory]
    sources = {record["memory"]["source"] for summary in summaries for record in summary.records if record["memory"]}
    device: Literal["cpu", "cuda"] = "cuda" if "torch.cuda" in sources else "cpu"
    predictions = predict_cells(cells, policy_dirs, MeasureSpec.from_dict(run.measure).probed_step, device, notify)
    write_predictions(
        folder,
        {cell_id: entry.to_dict() for cell_id, entry in predictions.items() if isinstance(entry, Estimate)},
        {cell_id: entry for cell_id, entry in predictions.items() if isinstance(entry, str)},
    )
    return predictions
