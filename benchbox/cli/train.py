"""`benchbox train`: the complete trainer, with the same step that `benchbox run` measures."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.options import (
    MasterAddrOption,
    MasterPortOption,
    NnodesOption,
    NodeRankOption,
    NodeTimeoutOption,
    PolicyDirOption,
    TrainingLauncherName,
    TrainingLauncherOption,
    TrainingSetOption,
)
from benchbox.cli.slurm import SlurmOption, check_gpus, job_command, render, slurm_options, submit_and_follow
from benchbox.errors import EXIT_CELL_FAILED, EXIT_STOPPED, EXIT_THRESHOLD, EXIT_USAGE, ConfigurationError
from benchbox.launch.nodes.settings import DEFAULT_PORT, DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.launch.slurm.job import JobState, SlurmJob
    from benchbox.launch.supervise.outcome import Outcome
    from benchbox.spec.cell import Cell
    from benchbox.spec.measured_setup import MeasuredSetup

_EXIT_CODES = {
    "ConfigurationError": EXIT_USAGE,
    "DataError": EXIT_USAGE,
    "ThresholdError": EXIT_THRESHOLD,
}  # by error of a rank

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="A training file, or the name of one in matrices/train/.", show_default=False),
]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="RUN", help="Train with the set-up of a cell that this run directory has measured."),
]
CellOption = Annotated[str | None, typer.Option("--cell", metavar="ID", help="With --from: the beginning of the cell's id.")]
StepsOption = Annotated[int | None, typer.Option("--steps", metavar="N", help="Optimizer steps in all, as --set steps=N.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Output folder.", show_default="runs/train/<name of the config>")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest checkpoint; start anew if there is none.")
]
MaxRestartsOption = Annotated[
    int,
    typer.Option(
        "--max-restarts", metavar="N", min=0, help="How often to start again from the last checkpoint after a rank died."
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and print the plan, the parameter groups and the schedule.")
]
DrawingOption = Annotated[
    Path | None, typer.Option("--figure", metavar="FILE.svg", help="With --dry-run: draw the schedule.", show_default=False)
]


def train(
    sets: TrainingSetOption,
    policy_dirs: PolicyDirOption,
    slurm: SlurmOption,
    config: ConfigArgument = None,
    from_run: FromOption = None,
    cell: CellOption = None,
    steps: StepsOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    max_restarts: MaxRestartsOption = 0,
    launcher: TrainingLauncherOption = TrainingLauncherName.local,
    nnodes: NnodesOption = 1,
    node_rank: NodeRankOption = None,
    master_addr: MasterAddrOption = None,
    master_port: MasterPortOption = DEFAULT_PORT,
    node_timeout: NodeTimeoutOption = DEFAULT_TIMEOUT_S,
    dry_run: DryRunOption = False,
    drawing: DrawingOption = None,
) -> None:
    """Train a policy with the step that `run` measures.

    The same seed gives bit-identical losses.

    With --from and --cell, the set-up is that of a measured cell, and CONFIG has only the rest: steps, checkpoints and so on.

    The output folder gets metrics.jsonl with the metrics of every step, validation.jsonl with every validation, and
    checkpoints/ with everything needed to resume.

    SIGTERM, SIGUSR1, SIGHUP or ctrl-C, sent to this command, stop the training after a step, with a checkpoint; a second one
    ends it at once. SIGTERM and SIGUSR1 sent to a rank stop it likewise.

    Exit code 3 when a rank failed, 4 when an audit ended the training, 130 when it was stopped.
    """
    from rich.console import Console

    from benchbox.cli.nodes import check_world_sizes, follow_node_0, open_launcher, open_node_0
    from benchbox.cli.statistics import prepare_statistics
    from benchbox.cli.train_preview import preview
    from benchbox.launch.lock import lock_run_directory
    from benchbox.launch.nodes.settings import read_node_settings
    from benchbox.launch.process.signals import collect_stop_signals
    from benchbox.launch.training import launch_training
    from benchbox.launch.training_progress import TrainingProgress
    from benchbox.spec import parse_overrides
    from benchbox.spec.files import TRAINING_FILES, find_file
    from benchbox.spec.measured_setup import differences
    from benchbox.spec.train import load_train

    if steps is not None:
        sets = [*sets, f"steps={steps}"]
    nodes = read_node_settings(
        nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port, timeout_s=node_timeout
    )
    overrides, measured = parse_overrides(sets), _measured(config, from_run, cell, policy_dirs)
    if config is None and "steps" not in overrides:
        raise ConfigurationError("a training without a file needs its length: --steps N")
    loaded = load_train(config, overrides, policy_dirs, measured=measured)
    file, resources = None if config is None else find_file(config, TRAINING_FILES), slurm_options(launcher, slurm, nnodes)
    check_world_sizes(file, overrides, [loaded.cell.world_size], resources.nodes if resources else nnodes)
    if resources is not None:
        check_gpus(resources, [loaded.cell.world_size])
    if measured is not None:
        print(f"set-up: {measured.label}")
        for line in differences(loaded.cell, measured.cell):
            print(f"not as measured: {line}")
    folder = out or Path("runs") / "train" / loaded.name
    script = ""
    if resources:
        if file is None or measured is not None:
            raise ConfigurationError("--launcher slurm submits a training file; write the set-up of the cell into one")
        command = job_command(
            "train",
            file,
            resources,
            out=folder,
            sets=sets,
            policy_dirs=policy_dirs,
            node_timeout=node_timeout,
            more=[*["--resume"] * resume, "--max-restarts", str(max_restarts)],
        )
        script = render(loaded.name, command, folder, resources, requeued=None if resume else "--resume")
    if dry_run:
        preview(loaded, config, overrides, drawing)
        if resume:
            print(_describe_resume(folder, loaded.cell))
        print(f"\n{script}" if script else "", end="")
        return
    if drawing is not None:
        raise typer.BadParameter("draws the schedule of --dry-run only", param_hint="--figure")
    if script:
        _check_job(*submit_and_follow(script, folder))
        return
    if nodes is not None and nodes.rank:
        follow_node_0(folder, nodes, trains=True)
        return
    console = Console(highlight=False)
    if nodes is None:  # before the folder is there: data with an error leave nothing behind
        prepare_statistics(loaded.cell.data, [loaded.cell.seed], console)
    with lock_run_directory(folder), open_node_0(folder, nodes) as node_0:
        if nodes is not None:  # the others wait only for a node 0 that reports
            prepare_statistics(loaded.cell.data, [loaded.cell.seed], console)
        with collect_stop_signals() as stop_signals:
            outcome = launch_training(
                loaded,
                folder,
                resume=resume,
                launcher=open_launcher(launcher, nodes, node_0, lambda: bool(stop_signals)),
                max_restarts=max_restarts,
                policy_dirs=loaded.policy_dirs,
                progress=TrainingProgress(loaded, console),
                stop_signals=stop_signals,
            )
    _exit(outcome, folder)


def _describe_resume(folder: Path, cell: "Cell") -> str:
    from benchbox.store.checkpoints import describe_resume, list_checkpoints

    checkpoints = list_checkpoints(folder / "checkpoints")
    return describe_resume(checkpoints[-1], cell) if checkpoints else f"{folder} has no checkpoint: --resume starts anew"


def _check_job(job: "SlurmJob", state: "JobState") -> None:
    """Raise SlurmJobError unless the job of a training completed; its output, with the reason, is printed already."""
    from benchbox.launch.slurm.job import SlurmJobError

    if state.state != "COMPLETED":
        raise SlurmJobError(f"Slurm job {job.id} ended {state}; --resume submits the rest of the training")


def _measured(config: Path | None, run: Path | None, cell: str | None, policy_dirs: "Sequence[Path]") -> "MeasuredSetup | None":
    """Return the measured set-up that the options name, if any."""
    from benchbox.cli.measured_cell import check_policies, find_measured_cell

    if (run is None) != (cell is None):
        raise ConfigurationError("--from RUN and --cell ID go together")
    if run is None or cell is None:
        if config is None:
            raise ConfigurationError("give a training file, or the set-up of a measured cell: --from RUN --cell ID --steps N")
        return None
    setup = find_measured_cell(run, cell)
    if config is None:  # a file may name the policy by a path
        check_policies(run, [setup.cell.policy], policy_dirs)
    return setup


def _exit(outcome: "Outcome", folder: Path) -> None:
    from benchbox.store.checkpoints import list_checkpoints

    checkpoints = list_checkpoints(folder / "checkpoints")
    newest = f"newest checkpoint: {checkpoints[-1]}" if checkpoints else "no checkpoint"
    if outcome.status == "ok":
        print(f"done; {newest}; metrics: {folder / 'metrics.jsonl'}")
        return
    error = outcome.error
    assert error is not None, "every other status has an error"
    if outcome.status == "interrupted":
        hint = "; continue with --resume" if checkpoints else ""
        print(f"stopped: {error['message']}; {newest}{hint}", file=sys.stderr)
        raise typer.Exit(EXIT_STOPPED)
    location = f" (rank {error['rank']}, {error['phase'] or 'outside a step'})" if error["rank"] is not None else ""
    print(f"error: {outcome.status}: {error['type']}: {error['message']}{location}; {newest}", file=sys.stderr)
    print(f"error: logs of each rank: {folder / 'launch'}", file=sys.stderr)
    raise typer.Exit(_EXIT_CODES.get(error["type"], EXIT_CELL_FAILED))
