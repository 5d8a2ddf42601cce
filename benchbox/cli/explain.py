"""`benchbox explain`: everything there is to say about a rule of the precision audit."""

import textwrap
from typing import Annotated

import typer

WIDTH = 100
INDENT = 11


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("explain")(explain)


def explain(
    code: Annotated[
        str, typer.Argument(metavar="CODE", help="A rule, such as BXP101: see benchbox list rules.", show_default=False)
    ],
) -> None:
    """Print what a rule demands and why, how it is measured, and the repair."""
    from benchbox.audit.rules import rule

    found = rule(code)
    typer.echo(f"{found.code} {found.severity}: {found.title}")
    for name, text in (
        ("why", found.rationale),
        ("measured", found.measurement),
        ("repair", found.repair),
        ("seen in", ", ".join(found.references)),
    ):
        if text:
            typer.echo()
            typer.echo(
                textwrap.fill(
                    f"{name:<{INDENT}}{text}",
                    WIDTH,
                    subsequent_indent=" " * INDENT,
                    break_on_hyphens=False,
                    break_long_words=False,
                )
            )
