"""Launch of a training run: one job that writes metrics as it progresses and leaves checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError, DataError, Problem, UnsupportedError
from benchbox.launch.capacity import capacity_refusal, shared_cores_warning
from benchbox.launch.follower import RowFollower
from benchbox.launch.job import Job
from benchbox.launch.restarts import FAILED_LAUNCH, is_restartable, record_restart
from benchbox.launch.supervise.group import run_group
from benchbox.launch.supervise.outcome import Outcome
from benchbox.registry.phases import CHECKPOINT
from benchbox.registry.refusals import cell_refusal
from benchbox.spec.train import schedule_note
from benchbox.store.checkpoints import describe_resume, list_checkpoints, newest_steps, set_damaged_aside

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.launch.supervise.trace import Trace
    from benchbox.launch.training_progress import TrainingProgress
    from benchbox.spec.train import TrainConfig
    from benchbox.worker.job_file import TrainJob

_REMOVED_FILES = ("metrics.jsonl", "validation.jsonl", "findings.jsonl", "restarts.json")
_REPLACED_FILES = ("data.json", "weights.json")


def launch_training(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool,
    launcher: Launcher,
    policy_dirs: Sequence[Path] = (),
    max_restarts: int,
    progress: TrainingProgress,
    stop_signals: Sequence[str],
) -> Outcome:
    """Train in a process group, and in another one after each restart.

    Args:
        config: the training run.
        folder: output folder; the files of the ranks go to `launch` in it.
        resume: continue from the newest checkpoint in `folder`.
        launcher: starts the ranks.
        policy_dirs: additional folders of policies.
        max_restarts: how often the ranks are started again from the newest checkpoint after one of them died.
        progress: shows stages, rows of metrics and findings as they appear.
        stop_signals: names of the signals that asked to stop; it grows while the training runs. See `_StopRequests`.

    Raises:
        ConfigurationError: the folder has checkpoints and `resume` is false, they are of another configuration, benchbox did
            not make its `launch` or the files that a training writes, or this machine cannot run so many ranks.
        UnsupportedError: the backend cannot run this cell.
    """
    cell = config.cell
    _check(config, folder, resume, launcher.nnodes, progress)
    if resume and (taken := newest_steps(folder / "checkpoints")) >= config.steps:
        more = f"steps is {config.steps}: nothing is left to train; --steps N with a larger number trains on"
        progress.message(f"the newest checkpoint is after {taken} steps, and {more}")
        return Outcome("ok")
    if note := schedule_note(config):
        progress.message(f"note: {note}")
    job_config: TrainJob = {
        "kind": "train",
        "train": config.to_dict(),
        "folder": str(folder.resolve()),
        "checkpoint": _newest_checkpoint(folder) if resume else None,
        "policy_dirs": [str(directory.resolve()) for directory in policy_dirs],
    }
    job = Job(
        config=job_config,
        ranks=cell.world_size,
        folder=folder / "launch",
        timeout_s=None,
        hang_after_s=config.hang_after_s,
        nnodes=launcher.nnodes,
    )
    job.check_folder()
    _check_files(folder, job)
    if not resume:
        for name in _REMOVED_FILES:
            (folder / name).unlink(missing_ok=True)
    with progress.display():
        outcome = _run_once(config, job, folder, launcher, progress, stop_signals)
        for number in range(1, max_restarts + 1):
            if stop_signals or not is_restartable(outcome):
                break
            try:
                damaged = set_damaged_aside(folder / "checkpoints")
            except DataError as error:
                progress.warn(f"no restart: {error}")
                break
            for line in damaged:
                progress.warn(line)
            progress.restarted(record_restart(folder, outcome, number, max_restarts))
            job = replace(job, config={**job_config, "checkpoint": _newest_checkpoint(folder)})
            outcome = _run_once(config, job, folder, launcher, progress, stop_signals)
    return outcome


def _run_once(
    config: TrainConfig,
    job: Job,
    folder: Path,
    launcher: Launcher,
    progress: TrainingProgress,
    stop_signals: Sequence[str],
) -> Outcome:
    """Run one process group, and show the rows of its metrics, validations and findings as they appear."""
    start = newest_steps(folder / "checkpoints")
    followers = [RowFollower(folder / "metrics.jsonl", progress.metrics_row, first_step=start)]
    if config.validation.every:  # else the rows are of an earlier run
        path, first = folder / "validation.jsonl", start + 1 if start else 0
        followers.append(RowFollower(path, progress.validation_row, first_step=first))
    if config.audit.every:
        followers.append(RowFollower(folder / "findings.jsonl", progress.audit_row, first_step=start + 1))
    requests = _StopRequests(stop_signals, progress)

    def on_progress(traces: Sequence[Trace]) -> None:
        progress.ranks_progressed(traces)
        requests.is_training = requests.is_training or all(_trains(trace) for trace in traces)
        if _trains(traces[0]):  # which has removed the rows of repeated steps
            for follower in followers:
                follower.read()

    outcome = run_group(job, launcher, on_progress=on_progress, stop=requests.ends, ask=requests.asks)
    if requests.is_training:
        for follower in followers:
            follower.read()
    return outcome


def _newest_checkpoint(folder: Path) -> str | None:
    checkpoints = list_checkpoints(folder / "checkpoints")
    return checkpoints[-1].name if checkpoints else None


def _trains(trace: Trace) -> bool:
    return trace.state is not None and trace.state.stage in ("train", "validate", CHECKPOINT)


def _check(config: TrainConfig, folder: Path, resume: bool, nnodes: int, progress: TrainingProgress) -> None:
    cell = config.cell
    if refusal := cell_refusal(cell):
        raise UnsupportedError(refusal)
    if refusal := capacity_refusal(cell.world_size // nnodes):
        raise ConfigurationError(refusal)
    if warning := shared_cores_warning(cell.world_size // nnodes):
        progress.warn(warning)
    for line in set_damaged_aside(folder / "checkpoints") if resume else ():
        progress.warn(line)
    paths = list_checkpoints(folder / "checkpoints")
    if paths and not resume:
        raise ConfigurationError(
            Problem(str(folder), f"holds a training, at {paths[-1].name}", "--resume continues it, --out names another folder")
        )
    if paths:
        progress.message(describe_resume(paths[-1], cell))


def _check_files(folder: Path, job: Job) -> None:
    """Raise ConfigurationError if the folder has files with the names of a training's, and no training has run in it."""
    if job.was_prepared or list_checkpoints(folder / "checkpoints") or any(folder.glob(f"{FAILED_LAUNCH}*")):
        return
    for name in (*_REMOVED_FILES, *_REPLACED_FILES):
        if (folder / name).exists():
            message = "exists, and is not of a training in this folder, which would replace it"
            raise ConfigurationError(Problem(str(folder / name), message, "name another directory with --out"))


class _StopRequests:
    """Signals that asked a training to stop: the first asks the ranks, the second ends them.

    A training that takes no steps yet has nothing to save, and ends at the first.
    """

    def __init__(self, received: Sequence[str], progress: TrainingProgress) -> None:
        self._received = received
        self._progress = progress
        self.is_training = False
        self._has_asked = False

    def ends(self) -> bool:
        """Return whether to end the group now."""
        return len(self._received) > 1 or (bool(self._received) and not self.is_training)

    def asks(self) -> bool:
        """Return whether to ask the ranks to stop."""
        if self._received and not self._has_asked:
            self._has_asked = True
            self._progress.stop_requested(self._received[0])
        return self._has_asked
