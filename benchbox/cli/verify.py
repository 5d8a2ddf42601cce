"""`benchbox verify`: the invariants of the records of a run."""

from pathlib import Path
from typing import Annotated

import typer

from benchbox.errors import RecordError, ThresholdError


def verify(path: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    """Hold every record of a run against what must be true of it. Exit code 4 when an invariant is violated."""
    from rich.console import Console

    from benchbox.analysis.invariants import examine
    from benchbox.report.rows import print_rows, say
    from benchbox.store.run import RunStore

    records = list(RunStore(path).records())
    if not records:
        raise RecordError(f"{path}: no records to verify; `benchbox run` measures them")
    found = examine(records)
    broken = {violation.sentence for violation in found.violations}
    console = Console()

    def verdict(sentence: str) -> str:
        if sentence in broken:
            return "violated"
        return "held" if found.held[sentence] else "-"

    rows = [(text, str(held), str(found.not_applicable[text]), verdict(text)) for text, held in found.held.items()]
    print_rows(console, ("invariant", "held", "not applicable", "verdict"), rows, right=("held", "not applicable"))
    for violation in found.violations:
        say(console, f"{violation.cell_id} launch {violation.launch}: {violation.sentence}: {violation.found}", style="red")
    if found.violations:
        raise ThresholdError(f"violations in {len(records)} records of {path}: {len(found.violations)}")
    say(console, f"{len(records)} records, every invariant that applies holds")


def register(app: typer.Typer) -> None:
    """`verify RUN`."""
    app.command()(verify)
