"""`benchbox run --launcher slurm`: the job that measures a matrix, and what it left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import counted
from benchbox.cli.run_here import report
from benchbox.cli.slurm import job_command, render, submit_and_follow
from benchbox.errors import CellFailedError
from benchbox.launch.runner import RunSummary
from benchbox.launch.slurm.job import SlurmJobError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.cli.matrix_run import MatrixRun
    from benchbox.launch.resume import Launches
    from benchbox.launch.slurm.job import JobState, SlurmJob
    from benchbox.launch.slurm.options import SlurmOptions
    from benchbox.store.run import RunStore


def render_job(
    matrix_run: MatrixRun,
    resources: SlurmOptions,
    *,
    sets: Sequence[str],
    policy_dirs: Sequence[Path],
    only: Sequence[str],
    estimate: bool,
    node_timeout: float,
) -> str:
    """Return the script of the job, whose command is this one on the nodes of the job."""
    more = [word for text in only for word in ("--only", text)]
    more += ["--fresh"] * matrix_run.fresh + ["--no-estimate"] * (not estimate)
    command = job_command(
        "run",
        matrix_run.matrix.path,
        resources,
        out=matrix_run.folder,
        sets=sets,
        policy_dirs=policy_dirs,
        node_timeout=node_timeout,
        more=more,
    )
    return render(matrix_run.matrix.name, command, matrix_run.folder, resources)


def run_as_job(matrix_run: MatrixRun, script: str) -> RunSummary:
    """Submit the job unless no launch is missing, follow it, and return the cells of walks in which nothing fits.

    Raises:
        CellFailedError: launches did not end ok.
        SlurmJobError: Slurm ended the job before it was done.
        typer.Exit: the user stopped.
    """
    pending = matrix_run.find_pending(fresh=matrix_run.fresh)
    if pending.launches:
        job, state = submit_and_follow(script, matrix_run.folder)
        check_job(job, state, matrix_run.find_pending(fresh=False).launches, matrix_run.store, fresh=matrix_run.fresh)
        if not state.ended_by_itself:  # Slurm ended it after its launches, perhaps before the reports
            report(matrix_run.folder)
    else:
        print(f"all {pending.reused} launches are done already: no job was submitted")
        report(matrix_run.folder)
    return RunSummary(failed_cells=matrix_run.open_walks(fresh=False).without_fit() if matrix_run.matrix.search else set())


def check_job(job: SlurmJob, state: JobState, pending: Launches, store: RunStore, *, fresh: bool = False) -> None:
    """Raise the error of a job that left launches without an ok record.

    With `fresh`, the records may be those from before a job that ended before it began.
    """
    if not pending and state.state == "FAILED":  # nothing fits in a walk, or what followed the launches failed
        raise CellFailedError(f"Slurm job {job.id} failed, and no launch is missing; output: {job.log}")
    if not pending and (state.ended_by_itself or not fresh):
        return
    if not pending:
        raise SlurmJobError(f"Slurm job {job.id} ended {state}, and may not have measured all again; output: {job.log}")
    recorded = all(store.record(cell.cell_id, launch) for cell, launch in pending)
    if recorded and state.ended_by_itself:
        raise CellFailedError(
            f"Slurm job {job.id}: {counted(len(pending), 'launch', 'launches')} did not end ok; output: {job.log}"
        )
    left = counted(len(pending), "launch", "launches")
    raise SlurmJobError(f"Slurm job {job.id} ended {state} with {left} left; the same command submits the rest")
