"""`benchbox report`: the results of runs as files."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or JSON of pytest-benchmark.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write here instead of into the run; of several runs, each into its own folder."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory of a rank in which the answer must fit, as in 80GiB.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write the figures, each as SVG, PDF and PNG, into this folder.")
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Only print a page of Markdown, as for $GITHUB_STEP_SUMMARY.")
    ] = False,
    pack: Annotated[
        bool,
        typer.Option("--pack", help="Also write run.json and all records as one records.parquet: a run to publish."),
    ] = False,
) -> None:
    """Print the table of runs and write their reports.

    They are report.html, report.md, table.csv and table.parquet. With --pack, DIR becomes a run directory that verify, check
    and report read like the original, without its cells/ folder. Of JSON of pytest-benchmark, FILE.html and FILE.md are
    written.
    """
    from dataclasses import astuple

    from rich.console import Console

    from benchbox.cli.outputs import check_folder
    from benchbox.cli.quantities import parse_memory
    from benchbox.errors import ConfigurationError, Problem
    from benchbox.report import write_reports
    from benchbox.report.benchmarks import write_benchmarks_report
    from benchbox.report.rows import say
    from benchbox.report.terminal import print_table
    from benchbox.report.write import summary_text, write_figures
    from benchbox.store.benchmarks import is_benchmarks

    memory_limit = None if memory is None else parse_memory(memory, "--memory")
    benchmarks = [path for path in paths if is_benchmarks(path)]
    options = {"--out": out, "--memory": memory, "--figures": figures, "--summary": summary, "--pack": pack}
    asked = [option for option, value in options.items() if value]
    only = [option for option in asked if option in ("--figures", "--summary")]
    if only and (others := [option for option in asked if option in ("--out", "--pack")]):
        raise ConfigurationError(f"with {' and '.join(only)} no report is written: leave {' and '.join(others)} out")
    if benchmarks and (others := [option for option in asked if option != "--out"]):
        hint = f"leave {' and '.join(others)} out"
        raise ConfigurationError(Problem(str(benchmarks[0]), "is JSON of pytest-benchmark and no run", hint))
    names = [path.resolve().name for path in paths]
    for option, folder in (("--out", out), ("--figures", figures)):
        if folder is not None and len(set(names)) < len(names):
            message = f"two of these runs have the same folder name: {option} cannot hold both, report them one by one"
            raise ConfigurationError(message)
        if folder is not None:
            check_folder(folder, option)
    console = Console()
    for path, name in zip(paths, names, strict=True):
        if figures is not None:
            for file in write_figures(path, figures / name if len(paths) > 1 else figures, memory_limit):
                say(console, str(file))
        if summary:
            typer.echo(summary_text(path, memory_limit), nl=False)
        if only:
            continue
        if path in benchmarks:
            for file in write_benchmarks_report(path, console, out):
                say(console, str(file))
            continue
        print_table(path, console, memory_limit=memory_limit)
        folder = out / name if out is not None and len(paths) > 1 else out
        for file in astuple(write_reports(path, folder, pack=pack, memory_limit=memory_limit)):
            if file is not None:
                say(console, str(file))
