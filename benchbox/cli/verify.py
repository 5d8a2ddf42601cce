"""`benchbox verify`: invariants of the records of a run."""

from pathlib import Path
from typing import Annotated

import typer

from benchbox.errors import ConfigurationError, RecordError, ThresholdError


def verify(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the file of a baseline.")],
    head: Annotated[
        str | None,
        typer.Option(metavar="DIGEST", help="Head of the chain as it was printed earlier: it must still be part of it."),
    ] = None,
) -> None:
    """Check the records of a run for contradictions. Exit code 4 when an invariant is violated.

    The chain shows what was edited or removed after it was measured. It has no key: compare its head with the printed one.
    """
    from rich.console import Console

    from benchbox.analysis.invariants import verify_run
    from benchbox.report.printed_tables import REPORT_INVARIANTS
    from benchbox.report.rows import print_rows, say
    from benchbox.store.run import RunStore

    if path.suffix == ".json":
        if head is not None:
            raise ConfigurationError("--head is for run directories: a baseline has no chain")
        _verify_baseline(path)
        return
    store = RunStore(path)
    result = verify_run(store, REPORT_INVARIANTS)
    if not result.records:
        raise RecordError(f"{path}: no records to verify; `benchbox run` measures them")
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
        say(console, str(violation), style="red")
    say(console, store.chain.describe())
    if result.violations:
        raise ThresholdError(f"violations in {result.records} records of {path}: {len(result.violations)}")
    if head is not None and (problem := store.chain.head_problem(head)):
        raise ThresholdError(f"{path}: {problem}")
    say(console, f"{result.records} records, every invariant that applies holds")


def _verify_baseline(path: Path) -> None:
    """Check the figures of a baseline against its launches."""
    from benchbox.analysis.baseline import baseline_problems
    from benchbox.analysis.quantities import counted
    from benchbox.store.baseline import read_baseline

    baseline = read_baseline(path)
    problems = baseline_problems(baseline)
    for problem in problems:
        typer.echo(problem)
    typer.echo("no chain: a baseline has the figures of launches and not their records")
    if problems:
        raise ThresholdError(f"violations in {path}: {len(problems)}")
    typer.echo(f"{counted(len(baseline.cells), 'cell')}, the figures follow from the launches")
