"""`benchbox compare`: what became better or worse from one run to another."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.errors import EXIT_INCONCLUSIVE, ThresholdError

if TYPE_CHECKING:
    from benchbox.analysis.changes import RunComparison
    from benchbox.analysis.sides import Side


class ComparisonFormat(StrEnum):
    """Values of `compare --format`."""

    text = "text"
    json = "json"
    markdown = "markdown"
    html = "html"
    junit = "junit"
    github = "github"
    sarif = "sarif"


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A run, a baseline, JSON of pytest-benchmark, or REV:PATH.")],
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The same, to be compared with BASE.")],
    metric: Annotated[
        list[str],
        typer.Option("--metric", metavar="NAME", default_factory=list, help="These metrics only.", show_default=False),
    ],
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            metavar="KEY,..",
            default_factory=list,
            show_default=False,
            help="What may differ between the environments, such as torch or machine.",
        ),
    ],
    relevant: Annotated[str, typer.Option("--relevant", metavar="PERCENT", help="A smaller change is none.")] = "2%",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 5 if nothing is worse but something unsettled.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List figures that did not change as well.")] = False,
    output: Annotated[ComparisonFormat, typer.Option("--format", help="Output format.")] = ComparisonFormat.text,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write there instead of to the terminal.")] = None,
) -> None:
    """Compare two runs, with a verdict on every metric.

    Exit code 4 if anything became worse.

    Cells are matched by id, so equal set-ups meet. Throughput is compared launch against launch by an exact test, peaks and
    losses by value. What one side lacks is `missing`, runs of different machines or versions are `incomparable`, and what
    launches do not settle is `inconclusive`: exit code 0, and 5 with --strict. Ratios of benchmarks are compared with the
    spread of their baseline.
    """
    from rich.console import Console

    from benchbox.analysis.changes import UNSETTLED
    from benchbox.analysis.sides import compare_sides, open_side
    from benchbox.cli.outputs import check_file
    from benchbox.cli.quantities import parse_share
    from benchbox.report.comparison.text import print_comparison
    from benchbox.store.files import write_text

    if out is not None:
        check_file(out)
    before, after = open_side(base), open_side(head)
    comparison = compare_sides(
        before,
        after,
        metric_names=metric,
        vary=[key.strip() for text in vary for key in text.split(",")],
        relevant=parse_share(relevant, "--relevant"),
    )
    if output is ComparisonFormat.text and out is None:
        print_comparison(comparison, Console(), everything=everything)
    else:
        text = _render(comparison, output, after, everything=everything)
        if out is None:
            typer.echo(text, nl=False)
        else:
            write_text(out, text)
            typer.echo(str(out))
    counts = comparison.counts
    if worse := counts.get("regression"):
        raise ThresholdError(f"{worse} of {len(comparison.changes)} figures are worse in {head} than in {base}")
    unsettled = sum(counts.get(verdict, 0) for verdict in UNSETTLED)
    if unsettled and strict:
        typer.echo(f"inconclusive: {unsettled} of {len(comparison.changes)} figures are not settled", err=True)
        raise typer.Exit(EXIT_INCONCLUSIVE)


def _render(comparison: "RunComparison", output: ComparisonFormat, head: "Side", *, everything: bool) -> str:
    import io
    import json
    from dataclasses import asdict

    from rich.console import Console

    from benchbox.report.comparison.github import render_github
    from benchbox.report.comparison.html import render_html
    from benchbox.report.comparison.junit import render_junit
    from benchbox.report.comparison.markdown import render_markdown
    from benchbox.report.comparison.sarif import render_sarif
    from benchbox.report.comparison.text import print_comparison

    match output:
        case ComparisonFormat.json:
            return json.dumps({**asdict(comparison), "counts": comparison.counts}, indent=1) + "\n"
        case ComparisonFormat.markdown:
            return render_markdown(comparison)
        case ComparisonFormat.html:
            return render_html(comparison)
        case ComparisonFormat.junit:
            return render_junit(comparison)
        case ComparisonFormat.github:
            return render_github(comparison, head.matrix_file, head.axes_line)
        case ComparisonFormat.sarif:
            return render_sarif(comparison, head.matrix_file, head.axes_line)
        case ComparisonFormat.text:
            stream = io.StringIO()
            print_comparison(comparison, Console(file=stream), everything=everything)
            return stream.getvalue()
