"""Attempts of a recording, complete on disk one by one, so that an interrupted recording continues after the last one.

An attempt that solved its task is a dataset of one episode. It counts once its outcome, a JSON file, is written: whatever a
killed process left besides is removed by the next one. `finish` makes the dataset, which appears in one rename.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from benchbox.data.format.metadata import read_json_object
from benchbox.data.writing.assembly import Part, assemble
from benchbox.errors import DataError
from benchbox.registry.recordings import ARGUMENTS, recording_folder
from benchbox.store.files import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchbox.data.writing.writer import LeRobotWriter

FILE = "meta/benchbox_recording.json"  # of a recorded dataset: its arguments, and the attempts at every task


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """Result of one attempt at a task."""

    solved: bool
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessRate:
    """Attempts at the task of an environment, and those that solved it."""

    env: str
    attempts: int
    solved: int

    def __str__(self) -> str:
        return f"solved in {self.solved} of {self.attempts} attempts ({self.solved / max(1, self.attempts):.0%})"


class AttemptStore:
    """Folder of an unfinished recording. As a context manager it keeps other processes out of it.

    Args:
        root: the dataset that is recorded.
        arguments: of the recording, as JSON values.

    Raises:
        DataError: the recording was begun with other arguments, another process continues it, or the folder cannot be locked.
    """

    def __init__(self, root: Path, arguments: Mapping[str, Any]) -> None:
        self._root = root
        self._folder = recording_folder(root)
        self._arguments = dict(arguments)
        self._outcomes: dict[int, list[AttemptResult]] = {}  # by the position of the task

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            problem = f"cannot be locked ({error.strerror}); record to another file system"
            if isinstance(error, BlockingIOError):
                problem = "another process is recording into it; wait for its end or stop it"
            raise DataError(f"{self._folder}: {problem}") from None
        path = self._folder / ARGUMENTS
        if path.exists():
            self._compare(read_json_object(path, missing=""))
        else:
            write_json(path, self._arguments)
        self._remove_incomplete()
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder.exists() and not any(outcome.solved for task in self._outcomes.values() for outcome in task):
            shutil.rmtree(self._folder)
        self._lock.close()

    def outcomes(self, task: int) -> Sequence[AttemptResult]:
        """Return the outcomes of the attempts at a task, whose position among the tasks is given, in their order."""
        return tuple(self._outcomes.get(task, ()))

    def next_path(self, task: int) -> Path:
        """Return where the dataset of the next attempt at a task is written."""
        return self._path(task, len(self.outcomes(task)))

    def save(self, task: int, writer: LeRobotWriter, outcome: AttemptResult) -> None:
        """Keep an attempt, written to `next_path`: its episode if it solved the task, otherwise that it did not."""
        path = self.next_path(task)
        histograms = {}
        if outcome.solved:
            writer.save_episode()
            histograms = {name: histogram.tolist() for name, histogram in writer.histograms.items()}
            writer.close()
        else:
            writer.abort()
        write_json(path.with_suffix(".json"), {"solved": outcome.solved, "frames": outcome.frames, "histograms": histograms})
        self._outcomes.setdefault(task, []).append(outcome)

    def finish(self, rates: Sequence[SuccessRate]) -> None:
        """Make the dataset of the attempts that solved their tasks, and remove the folder."""
        parts = [
            Part(self._path(task, number), self._histograms(task, number))
            for task, outcomes in sorted(self._outcomes.items())
            for number, outcome in enumerate(outcomes)
            if outcome.solved
        ]
        folder = self._folder / "dataset"
        assemble(parts, folder)
        tasks = [{"env": rate.env, "attempts": rate.attempts, "solved": rate.solved} for rate in rates]
        write_json(folder / FILE, {"arguments": self._arguments, "tasks": tasks})
        if self._root.exists():
            raise DataError(f"{self._root}: appeared while recording; nothing was overwritten")
        folder.rename(self._root)
        shutil.rmtree(self._folder)

    def _compare(self, begun: dict[str, Any]) -> None:
        if begun != self._arguments:
            raise DataError(f"{self._folder}: {describe_difference(begun, self._arguments)}; {_REMEDY}")

    def _remove_incomplete(self) -> None:
        """Read the outcomes, and remove everything that no outcome belongs to."""
        complete = {ARGUMENTS, "lock"}
        for path in sorted(self._folder.glob("*-*.json")):
            task, _, number = path.stem.partition("-")
            outcomes = self._outcomes.setdefault(int(task), [])
            assert len(outcomes) == int(number), "outcomes are written in order"
            values = read_json_object(path, missing="")
            outcomes.append(AttemptResult(solved=values["solved"], frames=values["frames"]))
            complete |= {path.name} | ({path.stem} if values["solved"] else set())
        for path in self._folder.iterdir():
            if path.name not in complete:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _path(self, task: int, number: int) -> Path:
        return self._folder / f"{task:03d}-{number:06d}"

    def _histograms(self, task: int, number: int) -> dict[str, np.ndarray]:
        values = json.loads(self._path(task, number).with_suffix(".json").read_text())["histograms"]
        return {name: np.array(histogram) for name, histogram in values.items()}


_REMEDY = "repeat these arguments to finish it, or remove the folder to begin again"


def describe_difference(begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return in which arguments a recording differs from one that is wanted."""
    names = [name for name in begun.keys() | wanted.keys() if begun.get(name) != wanted.get(name)]
    values = ", ".join(f"{name} {begun.get(name)!s}, not {wanted.get(name)!s}" for name in sorted(names))
    return f"was recorded with {values}"


def read_success_rates(root: Path) -> list[SuccessRate]:
    """Return the success rates of a recorded dataset, none if `data record` did not record it.

    Raises:
        DataError: the file that holds them is damaged.
    """
    path = root / FILE
    if not path.exists():
        return []
    try:
        tasks = read_json_object(path, missing="")["tasks"]
        return [SuccessRate(env=str(t["env"]), attempts=int(t["attempts"]), solved=int(t["solved"])) for t in tasks]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not the attempts of a recording ({type(error).__name__}: {error}); remove it") from None
