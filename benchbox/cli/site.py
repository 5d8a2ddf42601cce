"""`benchbox site`: a static site of trends over many runs."""

from pathlib import Path
from typing import Annotated

import typer


def site(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs, published runs and baselines, or REV:PATH of them in git.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the pages to.")],
    metric: Annotated[
        list[str],
        typer.Option(
            "--metric",
            metavar="NAME",
            default_factory=list,
            show_default=False,
            help="Trends of these metrics, instead of throughput and peak memory.",
        ),
    ],
    history: Annotated[
        bool, typer.Option("--history", help="Also read every version of a RUN that is in the history of this repository.")
    ] = False,
    relevant: Annotated[str, typer.Option("--relevant", metavar="PERCENT", help="A smaller change is none.")] = "2%",
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the site.")] = "Measurements over time",
) -> None:
    """Write a static site of the trends over many runs.

    It has an index, and for each matrix the trend of every cell over commits.

    Runs of the same matrix on the same machine form trends. Changes are marked, with the commits on both sides, where launches
    show them by an exact test. Reports that lie beside a RUN are linked, relative to DIR. The pages need no network and no
    scripts.
    """
    from benchbox.cli.outputs import check_folder
    from benchbox.cli.quantities import parse_share
    from benchbox.report.site.view import METRICS
    from benchbox.report.site.write import write_site

    check_folder(out)
    paths, sources = write_site(
        runs,
        out,
        history=history,
        metrics=tuple(metric) or METRICS,
        relevant=parse_share(relevant, "--relevant"),
        title=title,
    )
    for name, reason in sources.left_out:
        typer.echo(f"note: {name}: {reason}", err=True)
    for path in paths:
        typer.echo(str(path))
