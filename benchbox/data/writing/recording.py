"""Recording of demonstrations of scripted experts. An interrupted recording continues where it stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.data.writing.attempts import (
    FILE,
    AttemptResult,
    AttemptStore,
    SuccessRate,
    describe_difference,
    read_success_rates,
)
from benchbox.data.writing.simulator import Simulator
from benchbox.data.writing.writer import LeRobotWriter
from benchbox.errors import ConfigurationError, DataError
from benchbox.registry.recordings import recording_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

SUITE = "metaworld"
MAX_ATTEMPTS = 4  # per requested episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Run of the expert, and the number of episodes saved and discarded so far. It is saved if it solved the task.

    `stored` says that an earlier process, which was interrupted, made the attempt.
    """

    env: str
    saved: int
    discarded: int
    frames: int
    solved: bool
    stored: bool

    @property
    def success_rate(self) -> SuccessRate:
        """Share of the attempts so far that solved the task."""
        return SuccessRate(env=self.env, attempts=self.saved + self.discarded, solved=self.saved)


def record(
    root: Path,
    *,
    envs: Sequence[str],
    episodes: int,
    cameras: Sequence[str],
    size: int,
    every: int = 1,
    seed: int = 0,
    report: Callable[[Attempt], None] = lambda _: None,
) -> list[SuccessRate]:
    """Record `episodes` solved episodes of every environment into a dataset. An episode ends when its task is solved.

    The dataset appears when it is complete. Until then attempts are kept in the folder `<root>.recording`; called again with
    the same arguments, it continues after the last one of them, and makes the dataset that it would have made at once. A
    complete dataset of these arguments is left as it is.

    Args:
        envs: names like "metaworld/reach-v3", one task each.
        size: height and width of the images in pixels.
        every: control steps of 1/80 s for which an action is repeated. The dataset has 80 / `every` frames per second and can
            be replayed.
        report: called after every attempt, including discarded ones, and for those of earlier processes.

    Returns:
        The success rate of every environment's expert.

    Raises:
        ConfigurationError: an environment or camera is unknown, or an extra or a system library is missing.
        DataError: the expert solves the task too rarely, or `root` exists or was begun with other arguments.
    """
    arguments = {
        "envs": list(envs),
        "episodes": episodes,
        "cameras": list(cameras),
        "size": size,
        "every": every,
        "seed": seed,
    }
    if root.exists():
        return _complete(root, arguments)
    simulators = [Simulator(_env_name(env), cameras, size, every, seed) for env in envs]
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": [4], "names": ["x", "y", "z", "gripper"]},
        "action": {"dtype": "float32", "shape": [4], "names": ["dx", "dy", "dz", "gripper"]},
    }
    for camera in cameras:
        shape = [size, size, 3]
        features[f"observation.images.{camera}"] = {"dtype": "video", "shape": shape, "names": ["height", "width", "channels"]}

    with AttemptStore(root, arguments) as store:
        rates = []
        for task, simulator in enumerate(simulators):
            recorder = _TaskRecorder(store, task, simulator, features, report)
            rates.append(recorder.record(episodes))
        store.finish(rates)
    return rates


class _TaskRecorder:
    """Attempts at one task."""

    def __init__(
        self,
        store: AttemptStore,
        task: int,
        simulator: Simulator,
        features: dict[str, dict[str, Any]],
        report: Callable[[Attempt], None],
    ) -> None:
        self._store, self._task, self._simulator = store, task, simulator
        self._features, self._report = features, report
        self._saved = self._discarded = 0

    def record(self, episodes: int) -> SuccessRate:
        """Make attempts until there are `episodes` solved ones, and return the success rate."""
        for outcome in self._store.outcomes(self._task):
            self._count(outcome, stored=True)
        if self._saved < episodes:
            with self._simulator:
                while self._saved < episodes:
                    self._attempt(episodes)
        return SuccessRate(env=self._simulator.name, attempts=self._saved + self._discarded, solved=self._saved)

    def _attempt(self, episodes: int) -> None:
        attempts = self._saved + self._discarded
        if attempts == MAX_ATTEMPTS * episodes:
            raise DataError(
                f"{self._simulator.name}: the expert solved {self._saved} of {attempts} attempts, and {episodes} are wanted; "
                "record with another --seed or --every, or fewer --episodes"
            )
        path = self._store.next_path(self._task)
        writer = LeRobotWriter(path, fps=self._simulator.fps, features=self._features, robot_type="sawyer")
        try:
            frames, solved = self._simulator.attempt(attempts, writer)
            outcome = AttemptResult(solved=solved, frames=frames)
            self._store.save(self._task, writer, outcome)
        finally:
            writer.abort()
        self._count(outcome, stored=False)

    def _count(self, outcome: AttemptResult, *, stored: bool) -> None:
        self._saved += outcome.solved
        self._discarded += not outcome.solved
        attempt = Attempt(
            env=self._simulator.name,
            saved=self._saved,
            discarded=self._discarded,
            frames=outcome.frames,
            solved=outcome.solved,
            stored=stored,
        )
        self._report(attempt)


def _complete(root: Path, arguments: dict[str, Any]) -> list[SuccessRate]:
    """Return the success rates of a complete recording with these arguments, and remove what a killed process left of it."""
    rates = read_success_rates(root)
    if not rates:
        raise DataError(f"{root}: exists already; name another folder or remove it")
    recorded = json.loads((root / FILE).read_text(encoding="utf-8")).get("arguments", {})
    if recorded != arguments:
        raise DataError(f"{root}: {describe_difference(recorded, arguments)}; name another folder or remove it")
    shutil.rmtree(recording_folder(root), ignore_errors=True)
    return rates


def _env_name(env: str) -> str:
    suite, slash, name = env.partition("/")
    if not slash or suite != SUITE:
        raise ConfigurationError(f"unknown environment {env!r}: names are like {SUITE}/reach-v3")
    return name
