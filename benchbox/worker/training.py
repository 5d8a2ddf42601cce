"""The `train` job of a rank."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.train import TrainConfig
from benchbox.store.checkpoints import checkpoints as checkpoints_in
from benchbox.store.checkpoints import steps_of
from benchbox.store.files import write_json
from benchbox.trainer.checkpoint import Checkpoints
from benchbox.trainer.loop import train as run_loop
from benchbox.trainer.metrics import MetricsLog
from benchbox.worker.expected import check_backend
from benchbox.worker.reporting import Reporter

if TYPE_CHECKING:
    from benchbox.measure.phases import Position
    from benchbox.store.events import EventWriter


def train(job: dict[str, Any], rank: int, position: Position, events: EventWriter) -> None:
    """Train to the configured number of steps, from the newest checkpoint when the job says `resume`."""
    config = TrainConfig.from_dict(job["train"])
    cell, folder = config.cell, Path(job["folder"])
    report = Reporter(position, events)
    report.stage("build")
    checkpoints = None
    if config.checkpoint_every:
        checkpoints = Checkpoints(folder / "checkpoints", cell, every=config.checkpoint_every, keep=config.keep)
    policy = build_cell_policy(cell, [Path(each) for each in job["policy_dirs"]])
    found = checkpoints_in(folder / "checkpoints") if job["resume"] else []
    start = steps_of(found[-1]) if found else 0
    with closing(open_cell_data(cell, policy, rank, start_step=start)) as stream:
        report.stage("prepare")
        session = build_session(cell, policy, stream.statistics)
        check_backend(cell, session.backend.observe())
        if session.loaded is not None and rank == 0:
            write_json(folder / "weights.json", session.loaded.to_dict())
        if checkpoints is not None and found:
            checkpoints.restore(session, found[-1])
        metrics = MetricsLog(
            folder / "metrics.jsonl",
            start=start,
            every=config.log_every,
            writes=rank == 0,
        )
        report.stage("train", config.steps - start)
        run_loop(
            session,
            stream,
            start=start,
            steps=config.steps,
            metrics=metrics,
            checkpoints=checkpoints,
            instruments=position,
            after_step=report.said,
        )
