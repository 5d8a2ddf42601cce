"""The `train` job of a rank: train to the configured number of steps."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.data.samples.digest import digest_datasets
from benchbox.data.samples.training_texts import check_targets, describe_unseen_data
from benchbox.errors import DataError
from benchbox.measure.compilation import CompilationWatch
from benchbox.measure.phases import CombinedInstrument
from benchbox.registry.phases import CHECKPOINT
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, copy_meta_policy, open_cell_data
from benchbox.session.host_memory import check_host_memory
from benchbox.spec.train import TrainConfig
from benchbox.store.checkpoints import MANIFEST, checkpoint_steps, describe_resume
from benchbox.store.files import write_json
from benchbox.trainer.checkpoint import CheckpointManager
from benchbox.trainer.gauges import DataWaitClock, TrainingGauges
from benchbox.trainer.loop import train as run_loop
from benchbox.trainer.metrics import MetricsLog
from benchbox.trainer.stopping import AgreedStop, cpu_group
from benchbox.trainer.trackers.fan_out import Trackers
from benchbox.trainer.trackers.tracker import TrackedTraining
from benchbox.trainer.validation import Validation, ValidationPass
from benchbox.worker.expected import check_backend
from benchbox.worker.reporting import Reporter
from benchbox.worker.training_audit import TrainingAudit
from benchbox.worker.utilisation import StepUtilisation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.measure.phases import ProgressTracker
    from benchbox.registry.contracts import Batch
    from benchbox.store.events import EventWriter
    from benchbox.worker.job_file import TrainJob
    from benchbox.worker.stop_signals import StopSignals


VISIBLE_AFTER_S = 180.0  # NFS shows what another machine has written after up to a minute by default


def train(job: TrainJob, rank: int, tracker: ProgressTracker, events: EventWriter, signals: StopSignals) -> None:
    """Train to the configured number of steps, from the checkpoint that the job names.

    A signal that asks to stop ends the training after a step, with a checkpoint and the event `stopped`.
    """
    config = TrainConfig.from_dict(job["train"])
    cell, folder = config.cell, Path(job["folder"])
    reporter = Reporter(tracker, events)
    reporter.enter_stage("build")
    policy = build_cell_policy(cell, [Path(directory) for directory in job["policy_dirs"]])
    check_host_memory(cell, policy)
    meta_policy = copy_meta_policy(cell, policy)
    checkpoint = _awaited(folder / "checkpoints" / job["checkpoint"]) if job["checkpoint"] else None
    start = checkpoint_steps(checkpoint) if checkpoint else 0
    with ExitStack() as contexts:
        stream = contexts.enter_context(closing(open_cell_data(cell, policy, rank, start_step=start)))
        check_targets(stream.samples, stream.spec)
        for warning in describe_unseen_data(stream.samples) if rank == 0 else ():
            events.write("warning", message=warning)
        manager = CheckpointManager(
            folder / "checkpoints",
            cell,
            config.checkpoint,
            config.to_dict(),
            waiting=lambda: tracker.within(CHECKPOINT, 1),
            data=digest_datasets(stream.samples),
        )
        if checkpoint:
            manager.check_data(checkpoint)  # before weights are loaded and records replaced
        checkpoints = manager if config.checkpoint.every else None
        if checkpoints is not None:
            contexts.enter_context(checkpoints)
        validation = None
        if config.validation.every:
            validation = Validation(
                config.validation,
                ValidationPass(config.validation, cell, stream.samples, rank=rank, tracker=tracker),
                path=folder / "validation.jsonl",
                start=start,
                is_writer=rank == 0,
                best=config.checkpoint.keep_best,
            )
        reporter.enter_stage("prepare")
        session = build_session(cell, policy, stream.statistics, reporter.enter_stage)
        check_backend(cell, session.backend.observe())
        if rank == 0:
            write_json(folder / "data.json", stream.data_use.record())
        if session.loaded is not None and rank == 0:
            write_json(folder / "weights.json", session.loaded.to_dict())
        if checkpoints is not None:
            session.backend.training_state()  # a backend that cannot be saved says so before the first step
        batches: Iterator[Batch] = stream
        if checkpoint:
            batches = session.backend.rehearse(stream)
            manager.restore(session, checkpoint)
            if rank == 0:
                print(describe_resume(checkpoint, cell), flush=True)
        recipe, group, waits = recipe_by_name(cell.recipe), cpu_group(), DataWaitClock(session.device)
        utilisation = StepUtilisation(
            meta_policy,
            session.device,
            accumulation=cell.accumulation,
            compute=recipe.compute,
            is_partial=lambda: session.backend.skips_frozen_work,
            shapes_vary=cell.padding != "full",
        )
        gauges = TrainingGauges(
            waits,
            session.device,
            samples_per_step=cell.samples_per_step,
            samples_per_epoch=stream.samples_per_epoch,
            mfu=utilisation.mfu,
        )
        trackers = contexts.enter_context(_open_trackers(config, folder, start, rank))
        if validation is not None:
            validation.trackers = trackers
        metrics = MetricsLog(
            folder / "metrics.jsonl",
            start=start,
            block_steps=config.log_every,
            is_writer=rank == 0,
            warning=stream.episode_warning,
            gauges=gauges,
            trackers=trackers,
            take_warnings=manager.take_warnings,
        )
        audit = None
        if config.audit.every:
            audit = TrainingAudit(session, recipe, config.audit, folder / "findings.jsonl", start=start, group=group)
            contexts.callback(audit.close)
        stop = contexts.enter_context(closing(AgreedStop(lambda: signals.requested is not None, group)))
        signals.defer()
        contexts.enter_context(CompilationWatch(tracker, cell.compile))  # a rank that compiles is not stuck
        reporter.enter_stage("train", config.steps - start)
        completed = run_loop(
            session,
            utilisation.record(batches),
            start=start,
            steps=config.steps,
            metrics=metrics,
            checkpoints=checkpoints,
            validation=validation,
            audit=audit,
            instruments=CombinedInstrument(tracker, waits),
            after_step=reporter.report_progress,
            stopping=stop.agreed,
        )
    _print_warnings(manager.take_warnings())
    if completed < config.steps:
        events.write("stopped", completed=completed, signal=signals.requested)
    elif validation is not None and validation.completed != completed and rank == 0:
        events.write("warning", message=_describe_missing_validation(config, folder))


def _describe_missing_validation(config: TrainConfig, folder: Path) -> str:
    """Return a line about the validation after the last step that a signal ended, with the command that computes the same."""
    message, section = "the training was asked to stop, and has no validation after its last step", config.validation
    if not config.checkpoint.every:
        return message
    options = " --ema" if section.weights == "averages" else ""
    options += "" if section.max_samples is None else f" --max-samples {section.max_samples}"
    return f"{message}: benchbox validate {folder}{options} computes it"


def _awaited(checkpoint: Path) -> Path:
    """Return a checkpoint once this machine sees it: another one may have written it a moment ago.

    Raises:
        DataError: it does not see it in time.
    """
    deadline = time.monotonic() + VISIBLE_AFTER_S
    while not (checkpoint / MANIFEST).is_file():
        if time.monotonic() > deadline:
            message = f"{checkpoint}: is not visible on this machine; all nodes must share the folder of the training"
            raise DataError(message)
        time.sleep(0.2)
    return checkpoint


@contextmanager
def _open_trackers(config: TrainConfig, folder: Path, start: int, rank: int) -> Iterator[Trackers]:
    """Open the trackers of a training on rank 0, none on the others."""
    names = config.trackers if rank == 0 else ()
    training = TrackedTraining(name=config.name, folder=folder, config=config.to_dict(), start=start)
    trackers = Trackers.open(names, training)
    try:
        yield trackers
    finally:
        trackers.close()
        _print_warnings(trackers.take_warnings())


def _print_warnings(warnings: list[str]) -> None:
    """Print what is too late for a row of metrics to the log of the rank."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
