"""The `train` job of a rank: train to the configured number of steps."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.train import TrainConfig
from benchbox.store.checkpoints import checkpoint_steps, list_checkpoints
from benchbox.store.files import write_json
from benchbox.trainer.checkpoint import CheckpointManager
from benchbox.trainer.loop import train as run_loop
from benchbox.trainer.metrics import MetricsLog
from benchbox.worker.expected import check_backend
from benchbox.worker.reporting import Reporter

if TYPE_CHECKING:
    from benchbox.measure.phases import ProgressTracker
    from benchbox.store.events import EventWriter
    from benchbox.worker.job_file import TrainJobFile


def train(job: TrainJobFile, rank: int, tracker: ProgressTracker, events: EventWriter) -> None:
    """Train to the configured number of steps, from the newest checkpoint when the job says `resume`."""
    config = TrainConfig.from_dict(job["train"])
    cell, folder = config.cell, Path(job["folder"])
    reporter = Reporter(tracker, events)
    reporter.enter_stage("build")
    checkpoints = None
    if config.checkpoint_every:
        checkpoints = CheckpointManager(folder / "checkpoints", cell, interval=config.checkpoint_every, keep=config.keep)
    policy = build_cell_policy(cell, [Path(directory) for directory in job["policy_dirs"]])
    existing = list_checkpoints(folder / "checkpoints") if job["resume"] else []
    start = checkpoint_steps(existing[-1]) if existing else 0
    with closing(open_cell_data(cell, policy, rank, start_step=start)) as stream:
        reporter.enter_stage("prepare")
        session = build_session(cell, policy, stream.statistics, reporter.enter_stage)
        check_backend(cell, session.backend.observe())
        if rank == 0:
            write_json(folder / "data.json", stream.data_use.record())
        if session.loaded is not None and rank == 0:
            write_json(folder / "weights.json", session.loaded.to_dict())
        if checkpoints is not None and existing:
            checkpoints.restore(session, existing[-1])
        metrics = MetricsLog(
            folder / "metrics.jsonl",
            start=start,
            block_steps=config.log_every,
            is_writer=rank == 0,
            warning=stream.episode_warning,
        )
        reporter.enter_stage("train", config.steps - start)
        run_loop(
            session,
            stream,
            start=start,
            steps=config.steps,
            metrics=metrics,
            checkpoints=checkpoints,
            instruments=tracker,
            after_step=reporter.report_progress,
        )
