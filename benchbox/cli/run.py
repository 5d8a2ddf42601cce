"""`benchbox run`: measure the cells of a matrix and write reports."""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.options import LauncherName, LauncherOption, MatrixArgument, OnlyOption, PolicyDirOption, SetOption
from benchbox.errors import CellFailedError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.launch.runner import RunSummary
    from benchbox.plan import Plan
    from benchbox.spec import Matrix
    from benchbox.spec.cell import Cell
    from benchbox.store.run import Run


_EXIT_STOPPED = 130  # 128 + SIGINT, as a shell reports it

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The run directory.", show_default="runs/<name of the matrix>")
]
LaunchesOption = Annotated[
    int | None, typer.Option("--launches", metavar="N", help="Launches of every cell, instead of the number in the matrix.")
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Repeat launches whose records the run directory already has.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan without running it.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("run")(run)


def run(
    matrix: MatrixArgument,
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    only: OnlyOption,
    out: OutOption = None,
    launches: LaunchesOption = None,
    fresh: FreshOption = False,
    dry_run: DryRunOption = False,
    launcher: LauncherOption = LauncherName.local,
) -> None:
    """Measure every cell of a matrix, print the table and write the reports.

    Every launch is a new group of processes, and a cell that fails does not stop the others. Records that the run directory
    already has are reused, so the same command resumes a stopped run. With --only, records of other cells are left unchanged.

    Exit code 3 when a cell did not end ok, 130 when the run was stopped.
    """
    from benchbox.cli.capacity import skip_beyond_capacity
    from benchbox.cli.statistics import prepare_statistics
    from benchbox.launch.process import make_launcher
    from benchbox.launch.process.lock import lock_run_directory
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.launch.progress import ConsoleProgress
    from benchbox.launch.resume import pending_launches
    from benchbox.launch.runner import run_matrix
    from benchbox.plan import join_expressions, plan
    from benchbox.plan import launches as launches_of
    from benchbox.spec import load_matrix, parse_overrides
    from benchbox.store.run import RunStore

    if launches is not None:
        sets = [*sets, f"measure.launches={launches}"]
    loaded = load_matrix(matrix, parse_overrides(sets), policy_dirs)
    planned, selected = (skip_beyond_capacity(plan(loaded, only)) for only in ("", join_expressions(only)))
    if not selected.cells:
        reasons = "; ".join(dict.fromkeys(skip.reason for skip in selected.skipped))
        raise ConfigurationError(f"{matrix}: no cell can run: {reasons}")
    selected_launches = launches_of(selected, loaded.measure)
    folder = out or Path("runs") / loaded.name
    store = RunStore(folder)
    if dry_run:
        from benchbox.cli.plan import print_plan

        print_plan(loaded, selected)
        pending = pending_launches(selected_launches, loaded.measure, store, loaded.policy_dirs, fresh=fresh)
        print(f"in {folder}: {pending.reused} launches are done, {len(pending.launches)} would run")
        return

    from rich.console import Console

    console = Console(highlight=False)
    with lock_run_directory(folder):
        store.write_run(_build_run(loaded, planned, matrix_file=str(matrix)))
        console.print(loaded.data.reading, markup=False, soft_wrap=True)
        prepare_statistics(loaded.data, console)
        with stop_on_signals() as stop:
            summary = run_matrix(
                selected_launches,
                measure=loaded.measure,
                store=store,
                launcher=make_launcher(launcher),
                progress=ConsoleProgress(console, _make_label(planned)),
                policy_dirs=loaded.policy_dirs,
                fresh=fresh,
                stop=stop,
            )
        if not summary.stopped:
            _write_reports(folder)
    _exit(summary, folder, len(selected.cells))


def _build_run(matrix: "Matrix", planned: "Plan", *, matrix_file: str) -> "Run":
    from benchbox.store.run import Run

    return Run(
        name=matrix.name,
        matrix_file=matrix_file,
        matrix=matrix.values,
        reference=matrix.reference,
        thresholds=[threshold.to_dict() for threshold in matrix.thresholds],
        measure=asdict(matrix.measure),
        cells={cell.cell_id: cell.to_dict() for cell in planned.cells},
        skipped=[{"cell": skip.cell.to_dict(), "reason": skip.reason} for skip in planned.skipped],
    )


def _make_label(planned: "Plan") -> "Callable[[Cell], str]":
    from benchbox.analysis.summary import label, varying_fields

    fields = varying_fields(cell.to_dict() for cell in planned.cells)
    return lambda cell: label(cell.to_dict(), fields)


def _write_reports(folder: Path) -> None:
    from rich.console import Console

    from benchbox.report import write_reports
    from benchbox.report.terminal import print_table

    paths = write_reports(folder)
    print()
    print_table(folder, Console())
    print(f"\nreport: {paths.html}")


def _exit(summary: "RunSummary", folder: Path, cells: int) -> None:
    if summary.stopped:
        resume_command = shlex.join(["benchbox", *(word for word in sys.argv[1:] if word != "--fresh")])
        print(f"stopped with {summary.remaining} launches left; resume with: {resume_command}", file=sys.stderr)
        raise typer.Exit(_EXIT_STOPPED)
    if summary.failed_cells:
        raise CellFailedError(
            f"{len(summary.failed_cells)} of {cells} cells did not end ok; records and logs of each rank: {folder / 'cells'}"
        )
