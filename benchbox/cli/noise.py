"""`benchbox noise`: what equal launches and runs differ by on this machine, and what follows for thresholds."""

import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.options import MatrixArgument, OnlyOption, PolicyDirOption, SetOption
from benchbox.cli.quantities import parse_share
from benchbox.errors import EXIT_INCONCLUSIVE, CellFailedError, ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.spec.cell import Cell
    from benchbox.spec.matrix import Matrix
    from benchbox.store.noise import Noise
    from benchbox.store.run import Run, RunStore

_DEFAULT_LAUNCHES = 12
_EXIT_STOPPED = 130  # 128 + SIGINT


def noise(
    matrix: MatrixArgument,
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    only: OnlyOption,
    launches: Annotated[int, typer.Option(metavar="N", help="Launches in all, at least 10.")] = _DEFAULT_LAUNCHES,
    resolution: Annotated[str, typer.Option(metavar="PERCENT", help="Say how many launches settle it.")] = "2%",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory.", show_default="runs/<name>-noise-<n>")
    ] = None,
) -> None:
    """Launch the first cell of a matrix again and again, compare odd with even launches, and keep the noise of this machine.

    The two halves do not differ, so what they differ by is noise. Every call is a session, kept beside those before it in the
    user's cache, by machine and matrix; one that was interrupted is continued. The noise floor of four sessions contains the
    drift of the machine between runs: repeat this on other days. `check` names it, and calls no smaller difference a breach.

    Exit code 3 when a launch did not end ok, 5 when the host was busy: then nothing is kept.
    """
    from rich.console import Console

    from benchbox.analysis.baseline import machine_of
    from benchbox.analysis.noise import MIN_LAUNCHES, measure_noise, with_earlier_sessions
    from benchbox.analysis.summary import BUSY_HOST, label, summarize
    from benchbox.cli.capacity import check_any_cell, skip_beyond_capacity
    from benchbox.cli.matrix_run import build_run
    from benchbox.plan import Plan, join_expressions, plan
    from benchbox.spec import load_matrix, parse_overrides
    from benchbox.store.noise import read_noise, write_noise
    from benchbox.store.run import RunStore

    if launches < MIN_LAUNCHES:
        raise ConfigurationError(f"--launches {launches}: at least {MIN_LAUNCHES} are needed to measure noise")
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
    store, console = RunStore(out or _session_folder(Path("runs"), run.name, cell.cell_id)), Console(highlight=False)
    _launch(run, cell, loaded, store, console, text)
    records = list(store.records())
    (summary,) = summarize(run, records)
    steps = {"steps": loaded.measure.steps, "warmup_steps": loaded.measure.warmup_steps}
    session, effect = measure_noise(summary, text, steps)
    machine = machine_of(records)
    measured, left_out = with_earlier_sessions(session, read_noise(machine).get(loaded.name))
    is_busy = BUSY_HOST in summary.marks  # its floor would hide slowdowns from `check`
    lines = [
        f"{text}: launches differ by {session.sigma:.1%} (standard deviation of {session.launches} launches)",
        *(f"warning: {cause}: measure again on a quiet machine, this floor is high" for cause in summary.marks),
        f"odd against even launches: {effect.ratio:.3f}x, {_bound(effect.low)} to {_bound(effect.high)}, where 1 is the truth",
        *([] if left_out is None else [f"earlier sessions are left out: {left_out}"]),
        *_describe(session, measured, share, loaded.measure.launches),
        "not kept: the host was busy in a launch" if is_busy else f"kept in {write_noise(machine, loaded.name, measured)}",
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if is_busy:
        raise typer.Exit(EXIT_INCONCLUSIVE)


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

    measure = replace(loaded.measure, launches=run.launches)
    with lock_run_directory(store.path):
        store.write_run(run)
        prepare_statistics(loaded.data, [cell.seed], console)
        with stop_on_signals() as stop:
            asked = [(cell, number) for number in range(1, run.launches + 1)]
            if note := remove_outdated_launches(asked, measure, store, loaded.policy_dirs):
                console.print(note, markup=False, soft_wrap=True)
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
        raise typer.Exit(_EXIT_STOPPED)
    if summary.failed_cells:
        folder = store.path / "cells"
        raise CellFailedError(f"a launch of {text} did not end ok; records and logs of each rank: {folder}")


def _session_folder(runs: Path, name: str, cell_id: str) -> Path:
    """Return the run directory of an interrupted session of a cell if there is one, else a new one."""
    from benchbox.store.run import RunStore

    for number in count(1):
        folder = runs / f"{name}-{number}"
        if not (folder / "run.json").exists():
            break
        store = RunStore(folder)
        run = store.run()
        measured = sum(record["status"] == "ok" for record in store.records())
        if run.cells.keys() == {cell_id} and measured < run.launches:
            break
    return folder


def _describe(session: "Noise", measured: "Noise", share: float, launches: int) -> list[str]:
    """Return what a session shows about cells of one run, and all sessions about runs of different times."""
    from datetime import datetime

    from benchbox.analysis.noise import describe_floor, drift, launches_for, noise_floor, smallest_difference

    lines = [
        f"{number} launches of each cell show a difference of {smallest_difference(session.sigma, number):.1%} within a run"
        for number in (5, 10, 20)
    ]
    lines.append(f"{launches_for(session.sigma, share)} launches of each cell settle a difference of {100 * share:.3g}%")
    if (beyond := drift(measured.sessions)) is not None:
        first, last = (datetime.fromisoformat(measured.sessions[index].started_at) for index in (0, -1))
        hours = (last - first).total_seconds() / 3600
        span = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours"
        number = len(measured.sessions)
        lines.append(f"{number} sessions within {span} differ by {beyond:.1%} (standard deviation) beyond their launches")
    lines.append(f"noise floor between runs: {describe_floor(measured, max(5, launches))}")
    lines.append(f"proposed threshold: max_regression: {_rounded_up(noise_floor(measured, max(5, launches)))}")
    return lines


def _bound(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}x"


def _rounded_up(share: float) -> str:
    return f"{max(1, math.ceil(100 * share))}%"


def register(app: typer.Typer) -> None:
    """Register `noise MATRIX`."""
    app.command("noise")(noise)
