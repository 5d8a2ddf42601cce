"""Launch of a training run: one job that writes metrics as it progresses and leaves checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchbox.errors import ConfigurationError, Problem, UnsupportedError
from benchbox.launch.capacity import capacity_refusal
from benchbox.launch.job import Job
from benchbox.launch.supervise.group import never_stop, run_group
from benchbox.registry.backends import backend_info, backends
from benchbox.store.checkpoints import check_same_configuration, list_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.launch.supervise.outcome import Outcome
    from benchbox.launch.supervise.trace import Trace
    from benchbox.spec.train import TrainConfig
    from benchbox.worker.job_file import TrainJob


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
    """Train in a process group of its own.

    Args:
        config: the training run.
        folder: output folder; the files of the ranks go to `launch` in it.
        resume: continue from the newest checkpoint in `folder`.
        launcher: starts the ranks.
        policy_dirs: additional folders of policies.
        on_metrics: called with every row of `metrics.jsonl` as it appears.
        stop: see `run_group`.

    Raises:
        ConfigurationError: the folder has checkpoints and `resume` is false, they are of another configuration, or this machine
            cannot run so many ranks.
        UnsupportedError: the backend cannot run this cell, or cannot save it.
    """
    cell = config.cell
    _check(config, folder, resume)
    job_config: TrainJob = {
        "kind": "train",
        "train": config.to_dict(),
        "folder": str(folder.resolve()),
        "resume": resume,
        "policy_dirs": [str(directory.resolve()) for directory in policy_dirs],
    }
    job = Job(
        config=job_config,
        ranks=cell.world_size,
        folder=folder / "launch",
        timeout_s=None,
        hang_after_s=config.hang_after_s,
    )
    if not resume:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    follower = _MetricsFollower(folder / "metrics.jsonl", on_metrics, skip_existing=resume)
    outcome = run_group(job, launcher, on_progress=follower.on_progress, stop=stop)
    follower.read()
    return outcome


def _check(config: TrainConfig, folder: Path, resume: bool) -> None:
    cell, info = config.cell, backend_info(config.cell.backend)
    if refusal := info.refusal(world_size=cell.world_size, recipe=cell.recipe, checkpointing=cell.checkpointing):
        raise UnsupportedError(refusal)
    if refusal := capacity_refusal(cell.world_size):
        raise ConfigurationError(refusal)
    if config.checkpoint_every and not info.saves:
        names = " or ".join(name for name, backend in backends().items() if backend.saves)
        raise UnsupportedError(
            f"{cell.backend} cannot be saved yet: train with {names}, or set checkpoint.every=0 to train without"
        )
    paths = list_checkpoints(folder / "checkpoints")
    if paths and not resume:
        raise ConfigurationError(
            Problem(str(folder), f"holds a training, at {paths[-1].name}", "--resume continues it, --out names another folder")
        )
    if paths:
        check_same_configuration(paths[-1], cell)


class _MetricsFollower:
    """Passes on the rows that are appended to a file of JSON lines."""

    def __init__(self, path: Path, on_row: Callable[[Mapping[str, Any]], None], *, skip_existing: bool) -> None:
        self._path = path
        self._on_row = on_row
        self._last_step = -1
        if skip_existing:
            self._last_step = max((int(row["step"]) for row in self._rows()), default=-1)

    def on_progress(self, traces: Sequence[Trace]) -> None:
        if any(trace.state is not None and trace.state.stage == "train" for trace in traces):
            self.read()

    def read(self) -> None:
        rows = self._rows()
        if rows and rows[-1]["step"] < self._last_step:
            self._last_step = rows[-1]["step"]  # resuming removed the rows after the checkpoint: those steps are repeated
        for row in rows:
            if row["step"] > self._last_step:
                self._last_step = row["step"]
                self._on_row(row)

    def _rows(self) -> list[dict[str, Any]]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
