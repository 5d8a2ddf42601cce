"""`benchbox noise`: what equal launches and runs differ by on this machine, and what follows for thresholds."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.options import MatrixArgument, OnlyOption, PolicyDirOption, SetOption
from benchbox.cli.quantities import parse_share
from benchbox.errors import EXIT_INCONCLUSIVE, EXIT_STOPPED, CellFailedError, ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.spec.cell import Cell
    from benchbox.spec.matrix import Matrix
    from benchbox.store.noise import Noise
    from benchbox.store.run import Run, RunStore

_DEFAULT_LAUNCHES, _MAX_LAUNCHES = 12, 1000
_CONTINUED_WITHIN_H = 6  # of an earlier run's launches: on another day the machine may have drifted


def noise(
    matrix: MatrixArgument,
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    only: OnlyOption,
    launches: Annotated[int, typer.Option(metavar="N", help="Launches in all, at least 10.")] = _DEFAULT_LAUNCHES,
    resolution: Annotated[str, typer.Option(metavar="PERCENT", help="Say how many launches settle equality.")] = "2%",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Run directory; launches of an earlier `noise` in it are reused.",
            show_default="runs/<name>-noise-<n>",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the earlier runs of this matrix.")] = False,
) -> None:
    """Measure how much launches differ on this machine.

    The first cell of a matrix is launched again and again, and odd launches are compared with even ones. The two halves do not
    differ, so what they differ by is noise. Every call is a run of its own, kept beside those before it in the user's cache, by
    machine and matrix; one of today that was interrupted is continued. From four runs of one set-up on, the noise floor
    contains the drift of the machine between runs: repeat this on other days. `check` names the floor, and calls no smaller
    slowdown a breach.

    Exit code 3 when a launch did not end ok, 5 when the host was busy: then nothing is kept.
    """
    from rich.console import Console

    from benchbox.analysis.baseline import machine_folder
    from benchbox.analysis.noise import MIN_LAUNCHES, measure_noise, with_earlier_runs
    from benchbox.analysis.summary import BUSY_HOST, PARTIAL_STEPS, PARTLY_COMPILED, label, summarize
    from benchbox.cli.capacity import check_any_cell, skip_beyond_capacity
    from benchbox.cli.matrix_run import build_run
    from benchbox.plan import Plan, join_expressions, plan
    from benchbox.report.rows import say
    from benchbox.spec import load_matrix, parse_overrides
    from benchbox.store.noise import read_noise, write_noise
    from benchbox.store.run import RunStore

    if launches < MIN_LAUNCHES:
        raise ConfigurationError(f"--launches {launches}: at least {MIN_LAUNCHES} are needed to measure noise")
    if launches > _MAX_LAUNCHES:
        raise ConfigurationError(f"--launches {launches}: at most {_MAX_LAUNCHES}, as `measure.launches` of a matrix")
    share = parse_share(resolution)
    loaded = load_matrix(matrix, parse_overrides(sets), policy_dirs)
    planned = skip_beyond_capacity(plan(loaded, join_expressions(only)))
    check_any_cell(matrix, planned)
    cell = planned.cells[0]
    text = label(cell.to_dict(), ("backend", "policy", "batch"))
    described = build_run(loaded, Plan((cell,), ()), matrix_file=str(matrix), sets=sets, policy_dirs=policy_dirs)
    run = replace(
        described,
        name=f"{loaded.name}-noise",
        reference={},
        thresholds=[],
        measure={**described.measure, "launches": launches},
    )
    store, console = RunStore(out or _run_directory(Path("runs"), run.name, cell.cell_id)), Console(highlight=False)
    _launch(run, cell, loaded, store, console, text)
    records = list(store.records())
    (summary,) = summarize(run, records)
    measure = loaded.measure
    how = {"steps": measure.steps, "warm-up steps": measure.warmup_steps, "memory limit": measure.memory_limit}
    latest, effect = measure_noise(summary, text, {name: value for name, value in how.items() if value is not None})
    machine = machine_folder(records)
    earlier = None if fresh else read_noise(machine).get(loaded.name)
    measured, not_counted = with_earlier_runs(latest, earlier)
    is_busy = BUSY_HOST in summary.marks  # its floor would hide slowdowns from `check`
    lines = [
        f"{text}: launches differ by {latest.sigma:.1%} (standard deviation of {latest.launches} launches)",
        *(
            f"warning: {cause}: measure again on a quiet machine, this floor is high"
            for cause in summary.marks
            if cause not in (PARTLY_COMPILED, PARTIAL_STEPS)
        ),
        f"odd against even launches: {effect.ratio:.3f}x, {_bound(effect.low)} to {_bound(effect.high)}, where 1 is the truth",
        *_describe_launches(latest, share),
        *([] if is_busy else _describe_runs(measured, not_counted, max(5, measure.launches))),
    ]
    for line in lines:
        say(console, line)
    if is_busy:
        say(console, "not kept: the host was busy in a launch")
        raise typer.Exit(EXIT_INCONCLUSIVE)
    say(console, f"kept in {write_noise(machine, loaded.name, measured)}")


def _launch(run: "Run", cell: "Cell", loaded: "Matrix", store: "RunStore", console: "Console", text: str) -> None:
    """Launch a cell as often as the run says, but for the launches that are there.

    Raises:
        CellFailedError: a launch did not end ok.
        typer.Exit: a signal stopped it.
    """
    from benchbox.cli.options import TrainingLauncherName
    from benchbox.cli.statistics import prepare_statistics
    from benchbox.launch.lock import lock_run_directory
    from benchbox.launch.process import make_launcher
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.launch.progress import ConsoleProgress
    from benchbox.launch.resume import remove_outdated_launches
    from benchbox.launch.runner import run_matrix
    from benchbox.report.rows import say

    measure = replace(loaded.measure, launches=run.launches)
    with lock_run_directory(store.path):
        store.write_run(run)
        prepare_statistics(loaded.data, [cell.seed], console)
        with stop_on_signals() as stop:
            asked = [(cell, number) for number in range(1, run.launches + 1)]
            if note := remove_outdated_launches(asked, measure, store, loaded.policy_dirs):
                say(console, note)
            summary = run_matrix(
                asked,
                measure=measure,
                store=store,
                launcher=make_launcher(TrainingLauncherName.local),
                progress=ConsoleProgress(console, lambda _: text),
                policy_dirs=loaded.policy_dirs,
                stop=stop,
            )
    if summary.stopped:
        raise typer.Exit(EXIT_STOPPED)
    if summary.failed_cells:
        folder = store.path / "cells"
        raise CellFailedError(f"a launch of {text} did not end ok; records and logs of each rank: {folder}")


def _run_directory(folder_of_runs: Path, name: str, cell_id: str) -> Path:
    """Return the directory of a run of this cell that ended early in the last hours if there is one, else a new one."""
    from benchbox.store.run import RunStore

    for number in count(1):
        folder = folder_of_runs / f"{name}-{number}"
        if not (folder / "run.json").exists():
            break
        store = RunStore(folder)
        run, records = store.run(), list(store.records())
        is_of_cell = run.name == name and run.cells.keys() == {cell_id}
        is_recent = all(_hours_since(record["started_at"]) < _CONTINUED_WITHIN_H for record in records)
        if is_of_cell and is_recent and sum(record["status"] == "ok" for record in records) < run.launches:
            break
    return folder


def _hours_since(time: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds() / 3600


def _describe_launches(latest: "Noise", share: float) -> list[str]:
    """Return what the launches of the latest run show about cells of one run."""
    from benchbox.analysis.noise import launches_for, settled_difference

    lines = [
        f"{number} launches of each cell settle a difference of {settled_difference(latest.sigma, number):.1%} within a run"
        for number in (5, 10, 20)
    ]
    needed = launches_for(latest.sigma, share)
    return [*lines, f"{needed} launches of each cell settle that equal ones differ by less than {100 * share:.3g}%"]


def _describe_runs(measured: "Noise", not_counted: str | None, launches: int) -> list[str]:
    """Return what all runs of the cell show about runs of different times."""
    from benchbox.analysis.noise import describe_floor, describe_span, drift, noise_floor
    from benchbox.analysis.quantities import counted

    lines = []
    if not_counted is not None:
        others = counted(len(measured.other_runs), "earlier run is", "earlier runs are")
        lines.append(f"{others} not counted: {not_counted}")
    if (beyond := drift(measured.runs)) is not None:
        runs = f"{len(measured.runs)} runs within {describe_span(measured.runs)}"
        lines.append(f"{runs} differ by {beyond:.1%} (standard deviation) beyond their launches")
    lines.append(f"noise floor: {describe_floor(measured, launches)}")
    lines.append(f"proposed threshold: max_regression: {_rounded_up(noise_floor(measured, launches))}")
    return lines


def _bound(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}x"


def _rounded_up(share: float) -> str:
    return f"{max(1, math.ceil(100 * share))}%"
