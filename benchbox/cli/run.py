"""`benchbox run`: measure the cells of a matrix and write reports."""

import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.auto_launches import AUTO, Budget, plan_auto, run_until_settled
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
from benchbox.cli.slurm import SlurmOption, job_command, render, slurm_options, submit_and_follow
from benchbox.errors import CellFailedError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.launch.resume import Launches, PendingLaunches
    from benchbox.launch.runner import RunSummary
    from benchbox.launch.slurm.job import JobState, SlurmJob
    from benchbox.plan import Plan
    from benchbox.registry.launch_record import CellDict
    from benchbox.spec import Matrix
    from benchbox.spec.cell import Cell
    from benchbox.store.run import Run, RunStore


_EXIT_STOPPED = 130  # 128 + SIGINT, as a shell reports it
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


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("run")(run)


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
    master_port: MasterPortOption = 29500,
    node_timeout: NodeTimeoutOption = 180.0,
) -> None:
    """Measure every cell of a matrix, print the table and write the reports.

    Every launch is a new group of processes, and a cell that fails does not stop the others. Records that the run directory
    already has are reused, so the same command resumes a stopped run. With --only, records of other cells are left unchanged.

    With --launches auto, pairs of cells are tested at up to six numbers of launches, until all of them are settled or the
    budget ends. All looks together are wrong as rarely as one test.

    Exit code 3 when a cell did not end ok, 130 when the run was stopped.
    """
    from benchbox.cli.capacity import check_any_cell, skip_beyond_capacity
    from benchbox.cli.nodes import check_world_sizes, follow_node_0, open_launcher, open_node_0
    from benchbox.cli.predicting import predict_run
    from benchbox.cli.statistics import prepare_statistics
    from benchbox.cli.walk_launches import WalkLaunches, check_memory_limit, find_records, plan_walks
    from benchbox.launch.lock import lock_run_directory
    from benchbox.launch.nodes.settings import read_node_settings
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.launch.progress import ConsoleProgress
    from benchbox.launch.resume import pending_launches, remove_outdated_launches
    from benchbox.launch.runner import RunSummary, run_matrix
    from benchbox.plan import join_expressions, plan
    from benchbox.plan import launches as launches_of
    from benchbox.spec import load_matrix, parse_overrides
    from benchbox.store.run import RunStore

    auto = launches == AUTO
    allowance = Budget(None if budget is None else parse_duration(budget))
    share = parse_share(_RESOLUTION if resolution is None else resolution)
    for option, given in (("--budget", budget), ("--resolution", resolution)):
        if not auto and given is not None:
            raise ConfigurationError(f"{option} is for --launches auto: the number of launches decides otherwise")
    if launches is not None and not auto:
        sets = [*sets, f"measure.launches={launches}"]
    nodes = read_node_settings(
        nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port, timeout_s=node_timeout
    )
    overrides = parse_overrides(sets)
    resources = slurm_options(launcher, slurm, nnodes)
    loaded = load_matrix(matrix, overrides, policy_dirs)
    planned, selected = (plan(loaded, only) for only in ("", join_expressions(only)))
    if resources is None:  # a job runs on other machines
        planned, selected = (skip_beyond_capacity(cells, nnodes) for cells in (planned, selected))
    check_any_cell(matrix, selected)
    world_sizes = (cell.world_size for cell in selected.cells)
    check_world_sizes(loaded.path, overrides, world_sizes, resources.nodes if resources else nnodes)
    described = build_run(loaded, planned, matrix_file=str(matrix), sets=sets, policy_dirs=policy_dirs)
    measure = loaded.measure
    if resources is None and not dry_run:
        check_memory_limit(loaded, overrides)
    if auto:
        if not loaded.reference or resources:
            raise ConfigurationError("--launches auto tests pairs with the reference of the matrix, and runs without Slurm")
        described = plan_auto(described, planned, share)
        measure = replace(measure, launches=1)  # of the walks; those of the looks follow
    selected_launches = [] if auto and not loaded.search else launches_of(selected, loaded.measure)
    folder = out or Path("runs") / loaded.name
    store = RunStore(folder)

    def open_walks(*, fresh: bool) -> WalkLaunches:
        """Read the plan of the run directory, to go on with its walks."""
        with_walks = described
        if loaded.search:
            earlier = store.run() if (folder / "run.json").is_file() else None
            with_walks = plan_walks(described, planned.walks, loaded.search, earlier, selected.walks if fresh else ())
        return WalkLaunches(with_walks, store, selected.walks, measure, loaded.policy_dirs, fresh)

    def find_pending(*, fresh: bool) -> "PendingLaunches":
        most = replace(measure, launches=max(described.sequential["looks"])) if described.sequential else measure
        chosen = selected_launches if loaded.search else launches_of(selected, most)
        pending = pending_launches(chosen, measure, store, loaded.policy_dirs, fresh=fresh)
        if not loaded.search:
            return pending
        walks = open_walks(fresh=fresh)
        return replace(pending, launches=[*pending.launches, *walks.pending()], reused=pending.reused + walks.done())

    script = ""
    if resources:
        more = [word for text in only for word in ("--only", text)]
        more += ["--fresh"] * fresh + ["--no-estimate"] * (not estimate)
        command = job_command(
            "run",
            loaded.path,
            resources,
            out=folder,
            sets=sets,
            policy_dirs=policy_dirs,
            node_timeout=node_timeout,
            more=more,
        )
        script = render(loaded.name, command, folder, resources)
    if dry_run:
        from benchbox.cli.plan import print_plan

        print_plan(loaded, selected)
        pending = find_pending(fresh=fresh)
        most = " at most" if auto else ", and those that follow in their walks" if planned.walks and pending.launches else ""
        print(f"in {folder}: {pending.reused} launches are done, {len(pending.launches)} would run{most}")
        print(f"\n{script}" if script else "", end="")
        return
    if resources:
        pending = find_pending(fresh=fresh)
        if pending.launches:
            job, state = submit_and_follow(script, folder)
            _check_job(job, state, find_pending(fresh=False).launches, store, fresh=fresh)
            if not state.ended_by_itself:  # Slurm ended it after its launches, perhaps before the reports
                _write_reports(folder)
        else:
            print(f"all {pending.reused} launches are done already: no job was submitted")
            _write_reports(folder)
        if loaded.search:
            done = RunSummary(failed_cells=open_walks(fresh=False).without_fit())
            _exit(done, folder, len(selected.cells), walks=True)
        return
    if nodes is not None and nodes.rank:
        follow_node_0(folder, nodes)
        return

    from rich.console import Console

    console = Console(highlight=False)
    with lock_run_directory(folder):
        with open_node_0(folder, nodes) as node_0:
            walks = open_walks(fresh=fresh)
            walks.predict(console)
            earlier = find_records(store, selected.cells, selected.walks) if fresh else []
            if selected_launches or not auto:
                store.write_run(walks.run)
            console.print(loaded.data.reading, markup=False, soft_wrap=True)
            prepare_statistics(loaded.data, (cell.seed for cell in (*selected.cells, *selected.walks)), console)
            with stop_on_signals() as stop:
                opened = open_launcher(launcher, nodes, node_0, stop)
                progress = ConsoleProgress(console, _make_label(planned))

                def run_launches(pending: "Launches") -> "RunSummary":
                    return run_matrix(
                        pending,
                        measure=measure,
                        store=store,
                        launcher=opened,
                        progress=progress,
                        policy_dirs=loaded.policy_dirs,
                        stop=stop,
                        may_start=allowance.has_time,
                    )

                for cell_id, launch in earlier:  # now that launches can begin: a run that is stopped resumes with what it has
                    store.remove_record(cell_id, launch)
                if selected_launches and not auto:
                    note = remove_outdated_launches(selected_launches, measure, store, loaded.policy_dirs)
                    if note:
                        console.print(note, markup=False, soft_wrap=True)
                summary = run_launches(selected_launches) if selected_launches else RunSummary()
                if loaded.search and not summary.has_ended:
                    summary = summary.followed_by(walks.launch(run_launches, console))
                if auto and not summary.has_ended:
                    settled = run_until_settled(
                        walks.run,
                        store,
                        selected=walks.fastest_batches() if loaded.search else {cell.cell_id for cell in selected.cells},
                        launch=run_launches,
                        label=_cell_label(planned),
                        console=console,
                    )
                    summary = summary.followed_by(settled)
        if not summary.stopped:
            if estimate:
                predict_run(folder, loaded.policy_dirs, lambda cells: console.print(_predicting(cells), highlight=False))
            _write_reports(folder)
    _exit(summary, folder, len(selected.cells), walks=bool(loaded.search))


def _predicting(cells: int) -> str:
    return f"predicting memory and communication of {cells} cell{'s' if cells > 1 else ''}; --no-estimate leaves it out"


def _check_job(job: "SlurmJob", state: "JobState", pending: "Launches", store: "RunStore", *, fresh: bool = False) -> None:
    """Raise the error of a job that left launches without an ok record.

    With `fresh`, the records may be those from before a job that ended before it began.
    """
    from benchbox.launch.slurm.job import SlurmJobError

    if not pending and state.state == "FAILED":  # nothing fits in a walk, or what followed the launches failed
        raise CellFailedError(f"Slurm job {job.id} failed, and no launch is missing; output: {job.log}")
    if not pending and (state.ended_by_itself or not fresh):
        return
    if not pending:
        raise SlurmJobError(f"Slurm job {job.id} ended {state}, and may not have measured all again; output: {job.log}")
    recorded = all(store.record(cell.cell_id, launch) for cell, launch in pending)
    if recorded and state.ended_by_itself:
        raise CellFailedError(f"Slurm job {job.id}: {len(pending)} launches did not end ok; output: {job.log}")
    raise SlurmJobError(f"Slurm job {job.id} ended {state} with {len(pending)} launches left; the same command submits them")


def build_run(
    matrix: "Matrix", planned: "Plan", *, matrix_file: str, sets: "Sequence[str]", policy_dirs: "Sequence[Path]"
) -> "Run":
    """Return the plan of a run."""
    from benchbox.store.run import Run

    options = [("--set", text) for text in sets] + [("--policy-dir", str(folder)) for folder in policy_dirs]

    return Run(
        name=matrix.name,
        matrix_file=matrix_file,
        matrix=matrix.values,
        reference=matrix.reference,
        thresholds=[threshold.to_dict() for threshold in matrix.thresholds],
        measure=asdict(matrix.measure),
        cells={cell.cell_id: cell.to_dict() for cell in planned.cells},
        skipped=[{"cell": skip.cell.to_dict(), "reason": skip.reason} for skip in planned.skipped],
        options=[word for option in options for word in option],
    )


def _make_label(planned: "Plan") -> "Callable[[Cell], str]":
    cell_label = _cell_label(planned)
    return lambda cell: cell_label(cell.to_dict())


def _cell_label(planned: "Plan") -> "Callable[[CellDict], str]":
    from benchbox.analysis.summary import label, varying_fields

    fields = varying_fields(cell.to_dict() for cell in planned.cells)
    fields = tuple(dict.fromkeys([*fields, "batch"])) if planned.walks else fields
    return lambda cell: label(cell, fields)


def _write_reports(folder: Path) -> None:
    from rich.console import Console

    from benchbox.report import write_reports
    from benchbox.report.terminal import print_table
    from benchbox.store.run import RunStore

    paths = write_reports(folder)
    print()
    print_table(folder, Console())
    print(f"\nreport: {paths.html}\n{RunStore(folder).chain.describe()}")


def _exit(summary: "RunSummary", folder: Path, cells: int, *, walks: bool) -> None:
    resume_command = shlex.join(["benchbox", *(word for word in sys.argv[1:] if word != "--fresh")])
    if summary.stopped:
        least = "at least " if walks else ""
        print(f"stopped with {least}{summary.remaining} launches left; resume with: {resume_command}", file=sys.stderr)
        raise typer.Exit(_EXIT_STOPPED)
    if summary.out_of_time:
        print(f"the budget ended with {summary.remaining} launches left to the next look; continue with: {resume_command}")
    if summary.failed_cells:
        raise CellFailedError(
            f"{len(summary.failed_cells)} of {cells} cells did not end ok; records and logs of each rank: {folder / 'cells'}"
        )
