"""`benchbox noise`: what equal launches differ by on this machine, and what follows for thresholds."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchbox.cli.options import MatrixArgument, OnlyOption, PolicyDirOption, SetOption
from benchbox.cli.quantities import parse_share
from benchbox.errors import EXIT_INCONCLUSIVE, CellFailedError, ConfigurationError

_DEFAULT_LAUNCHES = 12
_EXIT_STOPPED = 130  # 128 + SIGINT


def noise(
    matrix: MatrixArgument,
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    only: OnlyOption,
    launches: Annotated[int, typer.Option(metavar="N", help="Launches in all, at least 10.")] = _DEFAULT_LAUNCHES,
    resolution: Annotated[str, typer.Option(metavar="PERCENT", help="Say how many launches settle it.")] = "2%",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run directory.", show_default="runs/<name>-noise")] = None,
) -> None:
    """Launch the first cell of a matrix again and again, compare odd with even launches, and keep the noise of this machine.

    The two halves do not differ, so what they differ by is noise. `check` names the noise floor, and calls no smaller
    difference a breach. It is kept in the user's cache, by machine and matrix. Launches that are there are reused.

    Exit code 3 when a launch did not end ok, 5 when the host was busy: then nothing is kept.
    """
    from rich.console import Console

    from benchbox.analysis.baseline import machine_of
    from benchbox.analysis.noise import MIN_LAUNCHES, launches_for, measure_noise, noise_floor
    from benchbox.analysis.summary import BUSY_HOST, label, summarize
    from benchbox.cli.capacity import check_any_cell, skip_beyond_capacity
    from benchbox.cli.matrix_run import build_run
    from benchbox.cli.options import TrainingLauncherName
    from benchbox.cli.statistics import prepare_statistics
    from benchbox.launch.lock import lock_run_directory
    from benchbox.launch.process import make_launcher
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.launch.progress import ConsoleProgress
    from benchbox.launch.resume import remove_outdated_launches
    from benchbox.launch.runner import run_matrix
    from benchbox.plan import Plan, join_expressions, plan
    from benchbox.spec import load_matrix, parse_overrides
    from benchbox.store.noise import write_noise
    from benchbox.store.run import RunStore

    if launches < MIN_LAUNCHES:
        raise ConfigurationError(f"--launches {launches}: at least {MIN_LAUNCHES} are needed to measure noise")
    share = parse_share(resolution)
    loaded = load_matrix(matrix, parse_overrides(sets), policy_dirs)
    planned = skip_beyond_capacity(plan(loaded, join_expressions(only)))
    check_any_cell(matrix, planned)
    cell = planned.cells[0]
    text = label(cell.to_dict(), ("backend", "policy", "batch"))
    measure = replace(loaded.measure, launches=launches)
    described = build_run(loaded, Plan((cell,), ()), matrix_file=str(matrix), sets=sets, policy_dirs=policy_dirs)
    run = replace(
        described,
        name=f"{loaded.name}-noise",
        reference={},
        thresholds=[],
        measure={**described.measure, "launches": launches},
    )
    folder = out or Path("runs") / run.name
    store, console = RunStore(folder), Console(highlight=False)
    with lock_run_directory(folder):
        store.write_run(run)
        prepare_statistics(loaded.data, [cell.seed], console)
        with stop_on_signals() as stop:
            launcher = make_launcher(TrainingLauncherName.local)
            asked = [(cell, number) for number in range(1, launches + 1)]
            if note := remove_outdated_launches(asked, measure, store, loaded.policy_dirs):
                console.print(note, markup=False, soft_wrap=True)
            summary = run_matrix(
                asked,
                measure=measure,
                store=store,
                launcher=launcher,
                progress=ConsoleProgress(console, lambda _: text),
                policy_dirs=loaded.policy_dirs,
                stop=stop,
            )
    if summary.stopped:
        raise typer.Exit(_EXIT_STOPPED)
    if summary.failed_cells:
        raise CellFailedError(f"a launch of {text} did not end ok; records and logs of each rank: {folder / 'cells'}")
    records = list(store.records())
    (cell_summary,) = summarize(run, records)
    measured, effect = measure_noise(cell_summary, text)
    is_busy = BUSY_HOST in cell_summary.marks  # its floor would hide slowdowns from `check`
    stored_path = None if is_busy else write_noise(machine_of(records), loaded.name, measured)
    low, high = (f"{bound:.3f}x" if bound is not None else "?" for bound in (effect.low, effect.high))
    needed = launches_for(measured.sigma, share)
    lines = [
        f"{text}: launches differ by {measured.sigma:.1%} (standard deviation of {measured.launches} launches)",
        f"odd against even launches: {effect.ratio:.3f}x, {low} to {high}, where 1 is the truth",
        *(f"noise floor with {number} launches: {noise_floor(measured.sigma, number):.1%}" for number in (5, 10, 20)),
        f"{needed} launches of each cell settle a difference of {100 * share:.3g}%",
        f"proposed threshold: max_regression: {_rounded_up(noise_floor(measured.sigma, max(5, loaded.measure.launches)))}",
        "not kept: the host was busy in a launch" if stored_path is None else f"kept in {stored_path}",
    ]
    for cause in cell_summary.marks:
        lines.insert(1, f"warning: {cause}: measure again on a quiet machine, this floor is high")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if is_busy:
        raise typer.Exit(EXIT_INCONCLUSIVE)


def _rounded_up(share: float) -> str:
    return f"{max(1, math.ceil(100 * share))}%"


def register(app: typer.Typer) -> None:
    """Register `noise MATRIX`."""
    app.command("noise")(noise)
