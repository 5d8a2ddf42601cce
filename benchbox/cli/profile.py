"""`benchbox profile`: where the time of one cell goes, and how near that is to what this machine can do."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.options import LauncherName, LauncherOption, OnlyOption, PolicyDirOption, SetOption
from benchbox.errors import EXIT_STOPPED, ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.spec.cell import Cell, MeasureSpec

_MOST_LISTED = 4
_FILE = "profile.json"


def profile(
    source: Annotated[
        Path,
        typer.Argument(metavar="MATRIX|RUN", help="A matrix, or with --cell a run directory.", show_default=False),
    ],
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    only: OnlyOption,
    cell: Annotated[
        str | None, typer.Option("--cell", metavar="ID", help="The cell of a run: the beginning of its id.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps under the profiler.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder of the files.", show_default="runs/<name>-profile/<cell id>"),
    ] = None,
    launcher: LauncherOption = LauncherName.local,
) -> None:
    """Profile one cell: where the time of a step goes.

    Prints time, FLOP/s and bytes/s by phase, time by tower, and the longest operations. Writes profile.json, and for every rank
    a trace of the profiled steps that ui.perfetto.dev opens. Times of phases are those of `measure.steps` steps without the
    profiler. Rates are compared with the peaks that `benchbox doctor --peaks` has measured on this machine for as many ranks
    and threads.
    """
    from rich.console import Console

    from benchbox.analysis.profile import build_profile
    from benchbox.cli.outputs import check_folder
    from benchbox.cli.statistics import prepare_statistics
    from benchbox.launch.process import make_launcher
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.launch.profiling import profile_cell
    from benchbox.report.profile import render_profile
    from benchbox.store.files import write_json
    from benchbox.store.peaks import read_peaks

    if out is not None:
        check_folder(out)
    if cell is None:
        name, selected, measure, policy_dirs = _cell_of_matrix(source, sets, policy_dirs, only)
    else:
        if sets or only:
            raise ConfigurationError("--cell names a cell of a run as it was measured: --set and --only are for a matrix")
        name, selected, measure = _cell_of_run(source, cell, policy_dirs)
    if selected.padding != "full":
        message = "profile times some steps and counts another one, and under padding: longest they differ in shape"
        raise ConfigurationError(f"{message}: profile the cell with padding: full")
    prepare_statistics(selected.data, [selected.seed], Console(highlight=False))
    folder = out or Path("runs") / f"{name}-profile" / selected.cell_id
    print(f"profiling {_describe(selected)}", flush=True)
    with stop_on_signals() as stop:
        ranks = profile_cell(
            selected,
            measure,
            profiled_steps=steps,
            folder=folder,
            launcher=make_launcher(launcher),
            policy_dirs=policy_dirs,
            stop=stop,
        )
    if ranks is None:
        raise typer.Exit(EXIT_STOPPED)
    profiled = build_profile(selected.cell_id, selected.to_dict(), ranks, read_peaks(ranks[0]["machine"]))
    write_json(folder / _FILE, profiled)
    print(render_profile(profiled))
    print(f"{folder / _FILE}, and for ui.perfetto.dev: {', '.join(str(folder / rank['trace']) for rank in profiled['ranks'])}")


def _cell_of_matrix(
    matrix: Path, sets: "Sequence[str]", policy_dirs: "Sequence[Path]", only: "Sequence[str]"
) -> "tuple[str, Cell, MeasureSpec, list[Path]]":
    """Return the name of a matrix, the one cell that is selected of it, how it is measured, and its folders of policies.

    Raises:
        ConfigurationError: several cells are selected, or none that this machine can run.
    """
    from benchbox.analysis.summary import label, varying_fields
    from benchbox.cli.capacity import check_any_cell, skip_beyond_capacity
    from benchbox.plan import join_expressions, plan
    from benchbox.spec import load_matrix, parse_overrides

    if (matrix / "run.json").is_file():
        raise ConfigurationError(Problem(str(matrix), "is a run", "name one of its cells by --cell ID"))
    loaded = load_matrix(matrix, parse_overrides(sets), policy_dirs)
    planned = skip_beyond_capacity(plan(loaded, join_expressions(only)))
    check_any_cell(matrix, planned)
    if len(planned.cells) > 1:
        fields = varying_fields(cell.to_dict() for cell in planned.cells)
        labels = [label(cell.to_dict(), fields) for cell in planned.cells[:_MOST_LISTED]]
        more = ", ..." if len(planned.cells) > _MOST_LISTED else ""
        message = f"{len(planned.cells)} cells are selected, and one is profiled: {', '.join(labels)}{more}"
        raise ConfigurationError(Problem(str(matrix), message, f"select one by --only with {', '.join(fields)}"))
    return loaded.name, planned.cells[0], loaded.measure, list(loaded.policy_dirs)


def _cell_of_run(run: Path, prefix: str, policy_dirs: "Sequence[Path]") -> "tuple[str, Cell, MeasureSpec]":
    from benchbox.cli.capacity import check_capacity
    from benchbox.cli.measured_cell import check_policies, find_measured_cell
    from benchbox.spec.cell import MeasureSpec
    from benchbox.store.run import RunStore

    setup, planned = find_measured_cell(run, prefix), RunStore(run).run()
    check_capacity(str(run), setup.cell.world_size)
    check_policies(run, [setup.cell.policy], policy_dirs)
    return planned.name, setup.cell, MeasureSpec.from_dict(planned.measure)


def _describe(cell: "Cell") -> str:
    from benchbox.analysis.summary import label

    return label(cell.to_dict(), ("policy", "size", "backend", "recipe", "batch", "world_size"))
