"""`benchbox check` and `benchbox baseline`: comparing a run with its thresholds and a baseline."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from benchbox.cli.options import Format, FormatOption
from benchbox.errors import EXIT_INCONCLUSIVE, ThresholdError

BASELINES = Path("reports/baselines")


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


def check(
    path: RunPath,
    baseline: Annotated[
        Path, typer.Option(metavar="FILE|DIR", help="A baseline file, or a folder of <machine>/<matrix>.json.")
    ] = BASELINES,
    thresholds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Demand these instead of the thresholds of the matrix.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 5 if nothing is worse than inconclusive.")] = False,
    output: FormatOption = Format.text,
) -> None:
    """Check a run against the thresholds of its matrix: expected, found, verdict.

    A cell that failed or has not run never passes, whatever the thresholds say. The verdict is `missing` when nothing is
    breached but something cannot be judged, as on a machine without a baseline: exit code 4, as for a breach. It is
    `inconclusive` when launches do not settle whether a metric is worse than the baseline's, or a difference is within the
    noise floor of the machine (`benchbox noise`): exit code 0, and 5 with --strict. Breaches that a threshold accepts for a
    while, or of severity `warning`, are printed and fail nothing.
    """
    from benchbox.analysis.baseline import find_baseline, machine_of
    from benchbox.analysis.gate import EXCUSED, gate, verdict_of
    from benchbox.analysis.noise import noise_floor, noise_of_matrix
    from benchbox.analysis.regression import BaselineLookup
    from benchbox.analysis.summary import summarize
    from benchbox.spec.threshold_section import load_thresholds
    from benchbox.store.noise import read_noise
    from benchbox.store.run import RunStore

    store = RunStore(path)
    run = store.run()
    summaries = summarize(run, store.records(), step_times=False)
    records = [record for summary in summaries for record in summary.records]
    if thresholds is not None:
        run = replace(run, thresholds=[threshold.to_dict() for threshold in load_thresholds(thresholds)])
    needed = any("max_regression" in threshold for threshold in run.thresholds)
    lookup = find_baseline(run, records, baseline) if needed else BaselineLookup(None, None)
    noise, machine = None, None
    if lookup.baseline is not None:
        machine = machine_of(records)
        noise = noise_of_matrix(read_noise(machine), run.name)
        lookup = replace(lookup, noise=noise)
    rows = gate(run, summaries, lookup)
    verdict = verdict_of(rows)
    noted = [row for row in rows if row.verdict != "ok"]
    failing = [row for row in noted if row.verdict not in EXCUSED]
    if output is Format.json:
        measured = {"noise": None if noise is None else asdict(noise)}
        typer.echo(json.dumps({"verdict": verdict, "rows": [row.to_dict() for row in rows]} | measured, indent=1))
    else:
        from rich.console import Console

        from benchbox.report.rows import print_rows, say

        console = Console()
        columns = ("cell", "metric", "expected", "found", "verdict")
        print_rows(console, columns, [(row.cell, row.metric, row.expected, row.actual, row.verdict) for row in rows])
        if noise is not None:
            floor = f"{noise_floor(noise.sigma, run.launches):.1%} with {run.launches} launches"
            say(console, f"noise floor of {machine}: {floor} (benchbox noise, {noise.measured_at}, {noise.cell})")
        elif machine is not None:
            say(console, f"noise floor of {machine}: not measured; `benchbox noise {run.matrix_file}` measures it")
        annotated = (row for row in noted if row.note)
        notes = (f"{row.note}" if row.verdict == "missing" else f"{row.cell}: {row.note}" for row in annotated)
        for note in dict.fromkeys(notes):
            say(console, f"note: {note}")
    if verdict == "missing":
        absent = "; ".join(dict.fromkeys(row.note for row in failing if row.note))
        raise ThresholdError(f"missing: {len(failing)} of {len(rows)} demands on {path} cannot be judged: {absent}")
    if verdict == "breach":
        breaches = sum(row.verdict == "breach" for row in failing)
        raise ThresholdError(f"{breaches} of {len(rows)} demands on {path} are not met" if rows else f"{path}: no cells")
    if verdict == "inconclusive":
        typer.echo(f"inconclusive: launches do not settle {len(failing)} of {len(rows)} demands on {path}", err=True)
        if strict:
            raise typer.Exit(EXIT_INCONCLUSIVE)


def promote(
    path: RunPath,
    machine: Annotated[str | None, typer.Option(help="Name of the machine; by default made from its own description.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the baselines.")] = BASELINES,
) -> None:
    """Make a run the baseline of its matrix on its machine. Refused (exit code 4) unless every planned launch ended ok."""
    from benchbox.analysis.baseline import machine_of, make_baseline, slug
    from benchbox.analysis.summary import summarize
    from benchbox.store.baseline import baseline_path, write_baseline
    from benchbox.store.run import RunStore

    store = RunStore(path)
    run, records = store.run(), list(store.records())
    name = slug(machine) if machine else machine_of(records)
    baseline = make_baseline(run, summarize(run, records), name)
    target = baseline_path(out, name, run.name)
    write_baseline(target, baseline)
    typer.echo(f"{target}: {len(baseline.cells)} cells; commit it, and `benchbox check` compares with it")


def register(app: typer.Typer) -> None:
    """Register `check RUN` and `baseline promote RUN`."""
    app.command()(check)
    baselines = typer.Typer(help="Baselines to compare runs with.", no_args_is_help=True)
    baselines.callback()(lambda: None)
    baselines.command()(promote)
    app.add_typer(baselines, name="baseline")
