"""`benchbox explain`: the full description of a rule of the precision audit."""

import textwrap
from typing import Annotated

import typer

WIDTH = 100
INDENT = 16


def explain(
    code: Annotated[
        str, typer.Argument(metavar="CODE", help="A rule, such as BXP101: see benchbox list rules.", show_default=False)
    ],
) -> None:
    """Explain a rule of the audit, and how to repair it."""
    from benchbox.audit.rules import rule as rule_by_code

    rule = rule_by_code(code)
    typer.echo(f"{rule.code} {rule.severity}: {rule.title}")
    for name, text in (
        ("severity", rule.conditions),
        ("why", rule.rationale),
        ("measured", rule.measurement),
        ("repair", rule.repair),
        *((f"  {library}", repair) for library, repair in rule.repairs.items()),
        ("afterwards", rule.afterwards.removeprefix("then ")),
        ("seen in", ", ".join(rule.references)),
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
