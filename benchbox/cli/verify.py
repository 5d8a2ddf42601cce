"""`benchbox verify`: invariants of the records of a run."""

from pathlib import Path
from typing import Annotated

import typer

from benchbox.errors import RecordError, ThresholdError


def verify(path: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    """Check every record of a run against the invariants. Exit code 4 when an invariant is violated."""
    from rich.console import Console

    from benchbox.analysis.invariants import verify_records
    from benchbox.report.rows import print_rows, say
    from benchbox.store.run import RunStore

    records = list(RunStore(path).records())
    if not records:
        raise RecordError(f"{path}: no records to verify; `benchbox run` measures them")
    result = verify_records(records)
    violated = {violation.sentence for violation in result.violations}
    console = Console()

    def verdict(sentence: str) -> str:
        if sentence in violated:
            return "violated"
        return "held" if result.satisfied[sentence] else "-"

    rows = [
        (sentence, str(count), str(result.not_applicable[sentence]), verdict(sentence))
        for sentence, count in result.satisfied.items()
    ]
    print_rows(console, ("invariant", "held", "not applicable", "verdict"), rows, right=("held", "not applicable"))
    for violation in result.violations:
        say(console, f"{violation.cell_id} launch {violation.launch}: {violation.sentence}: {violation.message}", style="red")
    if result.violations:
        raise ThresholdError(f"violations in {len(records)} records of {path}: {len(result.violations)}")
    say(console, f"{len(records)} records, every invariant that applies holds")


def register(app: typer.Typer) -> None:
    """Register `verify RUN`."""
    app.command()(verify)
