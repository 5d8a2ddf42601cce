"""All trackers of a training as one, which never fails."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchbox.registry.trackers import TRACKERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.trainer.trackers.tracker import TrackedTraining, Tracker


class Trackers:
    """Passes the rows of metrics on. A tracker that fails is left out from then on, with a warning: the training goes on."""

    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        self._trackers = dict(trackers or {})
        self._warnings: list[str] = []

    @classmethod
    def open(cls, names: Sequence[str], training: TrackedTraining) -> Trackers:
        """Open trackers by name."""
        trackers = cls()
        for name in names:
            try:
                module, _, function = TRACKERS[name].target.partition(":")
                trackers._trackers[name] = getattr(import_module(module), function)(training)
            except Exception as error:  # noqa: BLE001 (a tracker may raise anything)
                trackers._drop(name, error)
        return trackers

    def log(self, row: Mapping[str, Any]) -> None:
        """Pass on the numbers of a row of `metrics.jsonl`. What is unknown or no number is left out."""
        self._log(int(row["step"]), {name: value for name, value in row.items() if name != "step"})

    def log_validation(self, row: Mapping[str, Any]) -> None:
        """Pass on loss, terms and parts of a row of `validation.jsonl`, their names after `validation/`.

        They are values of the step that the validation follows; those of one before the first step are values of step 0.
        """
        values = {"loss": row["loss"], **row["terms"], **row.get("parts", {})}
        self._log(max(int(row["step"]) - 1, 0), {f"validation/{name}": value for name, value in values.items()})

    def _log(self, step: int, row: Mapping[str, Any]) -> None:
        if not self._trackers:
            return
        values = {name: float(value) for name, value in row.items() if _is_number(value)}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, values)
            except Exception as error:  # noqa: BLE001 (a tracker may raise anything)
                self._drop(name, error)

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 (a tracker may raise anything)
                self._drop(name, error)
        self._trackers.clear()

    def take_warnings(self) -> list[str]:
        """Return one line for every tracker that failed since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _drop(self, name: str, error: Exception) -> None:
        tracker = self._trackers.pop(name, None)
        message = next(iter(str(error).splitlines()), "")
        self._warnings.append(f"tracker {name} failed and gets no more values: {type(error).__name__}: {message}")
        if tracker is not None:
            with suppress(Exception):
                tracker.close()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
