"""A training run: one job whose progress is its metrics and whose result is its checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchbox.errors import ConfigurationError, Problem, UnsupportedError
from benchbox.launch.job import Job
from benchbox.launch.supervise.group import never_stop, run_group
from benchbox.registry.backends import backend_info, backends
from benchbox.store.checkpoints import check_same, checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.launch.supervise.outcome import Outcome
    from benchbox.launch.supervise.trace import Trace
    from benchbox.spec.train import TrainConfig


def launch_training(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool,
    launcher: Launcher,
    policy_dirs: Sequence[Path] = (),
    on_metrics: Callable[[Mapping[str, Any]], None],
    stop: Callable[[], bool] = never_stop,
) -> Outcome:
    """Train in a process group of its own; `on_metrics` gets every line of `metrics.jsonl` as it appears.

    Raises:
        ConfigurationError: the folder holds a training and `resume` was not said, or holds that of another configuration.
        UnsupportedError: the backend cannot run this cell, or cannot save it.
    """
    cell = config.cell
    _check(config, folder, resume)
    job = Job(
        kind="train",
        ranks=cell.world_size,
        told={
            "train": config.to_dict(),
            "folder": str(folder.resolve()),
            "resume": resume,
            "policy_dirs": [str(each.resolve()) for each in policy_dirs],
        },
        folder=folder / "launch",
        timeout_s=None,
        hang_after_s=config.hang_after_s,
    )
    if not resume:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    follower = _Follower(folder / "metrics.jsonl", on_metrics, from_now=resume)
    outcome = run_group(job, launcher, on_progress=follower.moved, stop=stop)
    follower.read()
    return outcome


def _check(config: TrainConfig, folder: Path, resume: bool) -> None:
    cell, info = config.cell, backend_info(config.cell.backend)
    if refusal := info.refusal(world_size=cell.world_size, recipe=cell.recipe, checkpointing=cell.checkpointing):
        raise UnsupportedError(refusal)
    if config.checkpoint_every and not info.saves:
        able = " or ".join(name for name, each in backends().items() if each.saves)
        raise UnsupportedError(
            f"{cell.backend} cannot be saved yet: train with {able}, or set checkpoint.every=0 to train without"
        )
    found = checkpoints(folder / "checkpoints")
    if found and not resume:
        raise ConfigurationError(
            Problem(str(folder), f"holds a training, at {found[-1].name}", "--resume continues it, --out names another folder")
        )
    if found:
        check_same(found[-1], cell)


class _Follower:
    """Reads what is appended to a file of JSON lines."""

    def __init__(self, path: Path, tell: Callable[[Mapping[str, Any]], None], *, from_now: bool) -> None:
        self._path = path
        self._tell = tell
        self._last = -1
        if from_now:
            self._last = max((int(row["step"]) for row in self._rows()), default=-1)

    def moved(self, traces: Sequence[Trace]) -> None:
        if any(trace.state is not None and trace.state.stage == "train" for trace in traces):
            self.read()

    def read(self) -> None:
        rows = self._rows()
        if rows and rows[-1]["step"] < self._last:
            self._last = rows[-1]["step"]  # an interrupted run's tail was taken out: its steps come again
        for row in rows:
            if row["step"] > self._last:
                self._last = row["step"]
                self._tell(row)

    def _rows(self) -> list[dict[str, Any]]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
