"""`benchbox run`: measure the cells of a matrix and write reports."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.analysis.quantities import counted
from benchbox.cli.auto_launches import AUTO, Budget
from benchbox.cli.options import (
    MasterAddrOption,
    MasterPortOption,
    MatrixArgument,
    NnodesOption,
    NodeRankOption,
    NodeTimeoutOption,
    OnlyOption,
    PolicyDirOption,
    SetOption,
    TrainingLauncherName,
    TrainingLauncherOption,
)
from benchbox.cli.quantities import parse_duration, parse_share
from benchbox.cli.slurm import SlurmOption, slurm_options
from benchbox.errors import EXIT_STOPPED, CellFailedError, ConfigurationError, Problem
from benchbox.launch.nodes.settings import DEFAULT_PORT, DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from benchbox.cli.matrix_run import MatrixRun
    from benchbox.launch.runner import RunSummary

_RESOLUTION = "2%"

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The run directory.", show_default="runs/<name of the matrix>")
]
LaunchesOption = Annotated[
    str | None,
    typer.Option(
        "--launches",
        metavar="N|auto",
        help="Launches of every cell, instead of the number in the matrix; auto: until every pair is settled.",
    ),
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="TIME", help="With --launches auto: no launch begins later: 90s, 30m, 2h.")
]
ResolutionOption = Annotated[
    str | None,
    typer.Option(
        "--resolution",
        metavar="PERCENT",
        help="With --launches auto: a smaller difference is none.",
        show_default=_RESOLUTION,
    ),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Repeat launches whose records the run directory already has.")]
EstimateOption = Annotated[
    bool,
    typer.Option(
        "--estimate/--no-estimate",
        envvar="BENCHBOX_ESTIMATE",
        help="Predict every cell after its launches, and report the predictions beside the measurements.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan without running it.")]


def run(
    matrix: MatrixArgument,
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    only: OnlyOption,
    slurm: SlurmOption,
    out: OutOption = None,
    launches: LaunchesOption = None,
    budget: BudgetOption = None,
    resolution: ResolutionOption = None,
    fresh: FreshOption = False,
    dry_run: DryRunOption = False,
    estimate: EstimateOption = True,
    launcher: TrainingLauncherOption = TrainingLauncherName.local,
    nnodes: NnodesOption = 1,
    node_rank: NodeRankOption = None,
    master_addr: MasterAddrOption = None,
    master_port: MasterPortOption = DEFAULT_PORT,
    node_timeout: NodeTimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    """Measure every cell of a matrix and write the reports.

    Every launch is a new group of processes, and a cell that fails does not stop the others. Records that the run directory
    already has are reused, so the same command resumes a stopped run. With --only, records of other cells are left unchanged.

    With --launches auto, pairs of cells are tested at up to six numbers of launches, until all of them are settled or the
    budget ends. All looks together are wrong as rarely as one test.

    Exit code 3 when a cell did not end ok, 130 when the run was stopped.
    """
    from benchbox.cli.matrix_run import open_matrix_run
    from benchbox.launch.nodes.settings import read_node_settings

    auto = launches == AUTO
    allowance = Budget(None if budget is None else parse_duration(budget))
    share = parse_share(_RESOLUTION if resolution is None else resolution)
    for option, given in (("--budget", budget), ("--resolution", resolution)):
        if not auto and given is not None:
            raise ConfigurationError(f"{option} is for --launches auto: the number of launches decides otherwise")
    if launches is not None and not auto:
        sets = [*sets, f"measure.launches={_check_launches(launches)}"]
    nodes = read_node_settings(
        nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port, timeout_s=node_timeout
    )
    resources = slurm_options(launcher, slurm, nnodes)
    matrix_run = open_matrix_run(
        matrix,
        out=out,
        sets=sets,
        policy_dirs=policy_dirs,
        only=only,
        resolution=share if auto else None,
        fresh=fresh,
        nodes=nnodes,
        resources=resources,
        will_launch=resources is None and not dry_run,
    )
    script = ""
    if resources:
        from benchbox.cli.run_job import render_job, run_as_job

        script = render_job(
            matrix_run,
            resources,
            sets=sets,
            policy_dirs=policy_dirs,
            only=only,
            estimate=estimate,
            node_timeout=node_timeout,
        )
    if dry_run:
        _print_dry_run(matrix_run, script)
        return
    if resources:
        summary = run_as_job(matrix_run, script)
    elif nodes is not None and nodes.rank:
        from benchbox.cli.nodes import follow_node_0

        follow_node_0(matrix_run.folder, nodes)
        return
    else:
        from benchbox.cli.run_here import run_here

        summary = run_here(matrix_run, launcher=launcher, nodes=nodes, may_start=allowance.has_time, estimate=estimate)
    _exit(summary, matrix_run.folder, len(matrix_run.selected.cells), walks=bool(matrix_run.matrix.search))


def _check_launches(text: str) -> int:
    """Return the number that `--launches` gives.

    Raises:
        ConfigurationError: it is no whole number, or below 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(Problem(f"--launches {text}", "is no number of launches", "give 1 or more, or auto"))
    return int(text)


def _print_dry_run(matrix_run: "MatrixRun", script: str) -> None:
    from benchbox.cli.plan import print_plan

    print_plan(matrix_run.matrix, matrix_run.selected)
    pending = matrix_run.find_pending(fresh=matrix_run.fresh)
    searches = bool(pending.launches and matrix_run.planned.walks)
    most = " at most" if matrix_run.auto else ", and those that follow in their walks" if searches else ""
    print(f"in {matrix_run.folder}: {pending.reused} launches are done, {len(pending.launches)} would run{most}")
    print(f"\n{script}" if script else "", end="")


def _exit(summary: "RunSummary", folder: Path, cells: int, *, walks: bool) -> None:
    resume_command = shlex.join(["benchbox", *(word for word in sys.argv[1:] if word != "--fresh")])
    if summary.stopped:
        least = "at least " if walks else ""
        left = f"{least}{counted(summary.remaining, 'launch', 'launches')} left"
        print(f"stopped with {left}; resume with: {resume_command}", file=sys.stderr)
        raise typer.Exit(EXIT_STOPPED)
    if summary.out_of_time:
        left = counted(summary.remaining, "launch", "launches")
        print(f"the budget ended with {left} left to the next look; continue with: {resume_command}")
    if summary.failed_cells:
        raise CellFailedError(
            f"{len(summary.failed_cells)} of {cells} cells did not end ok; records and logs of each rank: {folder / 'cells'}"
        )
