"""`benchbox check` and `benchbox baseline`: comparing a run, or ratios of benchmarks, with thresholds and a baseline."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.errors import EXIT_INCONCLUSIVE, ThresholdError

if TYPE_CHECKING:
    from benchbox.report.gate.view import GateView

BASELINES = Path("reports/baselines")

RUN_HELP = "A run directory, or JSON of pytest-benchmark."

baselines = typer.Typer(help="Baselines to compare runs with.", no_args_is_help=True)
baselines.callback()(lambda: None)


class GateFormat(StrEnum):
    """Values of `check --format`."""

    text = "text"
    json = "json"
    junit = "junit"
    sarif = "sarif"
    github = "github"


def check(
    path: Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)],
    baseline: Annotated[
        Path, typer.Option(metavar="FILE|DIR", help="A baseline file, or a folder of <machine>/<matrix>.json.")
    ] = BASELINES,
    thresholds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Demand these instead of the thresholds of the matrix.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Folder of the baseline, as `baseline promote --machine` named it.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 5 if nothing is worse than inconclusive.")] = False,
    output: Annotated[GateFormat, typer.Option("--format", help="Output format.")] = GateFormat.text,
) -> None:
    """Check a run against thresholds and a baseline.

    A cell that failed or has not run never passes, whatever the thresholds say, nor does a walk whose largest batch is smaller
    than in the baseline, or a cell of the baseline that is skipped now. The verdict is `missing` when nothing is breached but
    something cannot be judged, as on a machine without a baseline: exit code 4, as for a breach. It is `inconclusive` when
    launches do not settle whether a metric is worse than the baseline's, or a difference is within the noise floor of the
    matrix on this machine (`benchbox noise`): exit code 0, and 5 with --strict. Breaches that a threshold accepts for a while,
    or of severity `warning`, are printed and fail nothing.

    Of JSON of pytest-benchmark, every ratio that a test recorded is checked against <machine>/perf.json: a breach is more than
    the spread of the baseline's runs explains. Without a baseline of this machine they are inconclusive.
    """
    from benchbox.store.benchmarks import is_benchmarks

    open_gate = _ratio_gate if is_benchmarks(path) else _run_gate
    view = open_gate(path, baseline, thresholds, machine)
    _print(view, output)
    rows, failing = view.rows, view.failing
    if view.verdict == "missing":
        absent = "; ".join(dict.fromkeys(row.note for row in failing if row.note))
        raise ThresholdError(f"missing: {len(failing)} of {len(rows)} demands on {path} cannot be judged: {absent}")
    if view.verdict == "breach":
        breaches = sum(row.verdict == "breach" for row in failing)
        raise ThresholdError(f"{breaches} of {len(rows)} demands on {path} are not met" if rows else f"{path}: no cells")
    if view.verdict == "inconclusive":
        evidence = "the runs of the tests" if is_benchmarks(path) else "launches"
        typer.echo(f"inconclusive: {evidence} do not settle {len(failing)} of {len(rows)} demands on {path}", err=True)
        if strict:
            raise typer.Exit(EXIT_INCONCLUSIVE)


def _run_gate(path: Path, baseline: Path, thresholds: Path | None, machine_name: str | None) -> "GateView":
    from dataclasses import replace

    from benchbox.analysis.baseline import find_baseline, slug
    from benchbox.analysis.gate import gate
    from benchbox.analysis.noise import describe_floor, describe_missing_floor, why_not_used
    from benchbox.analysis.run_environments import environments_by_ranks
    from benchbox.analysis.summary import summarize
    from benchbox.report.gate.view import GateView, threshold_lines
    from benchbox.spec.threshold_section import load_thresholds
    from benchbox.store.noise import read_noise
    from benchbox.store.run import RunStore

    store = RunStore(path)
    run = store.run()
    summaries = summarize(run, store.records())
    records = [record for summary in summaries for record in summary.records]
    if thresholds is not None:
        run = replace(run, thresholds=[threshold.to_dict() for threshold in load_thresholds(thresholds, run.cells.values())])
    lookup = find_baseline(run, records, baseline, machine_name)
    is_relative = any("max_regression" in threshold for threshold in run.thresholds)
    noise, notes = None, []
    if run.walks and lookup.baseline is None and not is_relative:
        notes = [f"largest batches are not compared: {lookup.remedy}"]
    if is_relative and lookup.baseline is not None:
        machine = slug(str(lookup.baseline.environment.get("machine")))  # which the run has too, whatever its folder is called
        noises = read_noise(machine)
        noise = noises.get(run.name)
        other_setup = None if noise is None else why_not_used(noise, environments_by_ranks(records), run.measure)
        lookup = replace(lookup, noise=noise if other_setup is None else None)
        if noise is None:
            notes = [f"noise floor of {machine}: {describe_missing_floor(noises, run.matrix_file)}"]
        elif other_setup is not None:
            remedy = f"`benchbox noise {run.matrix_file}` measures that of this run"
            notes = [f"noise floor of {machine}: not used, since it was measured otherwise: {other_setup}; {remedy}"]
        else:
            floor = describe_floor(noise, run.launches)
            notes = [f"noise floor of {machine}: {floor} (benchbox noise, {noise.measured_at}, {noise.cell})"]
    file = run.matrix_path if thresholds is None else thresholds
    return GateView(
        path=str(path),
        rows=gate(run, summaries, lookup),
        file=str(file) if file else None,
        lines=threshold_lines(file, run.thresholds) if file else {},
        notes=notes,
        noise=lookup.noise,
    )


def _ratio_gate(path: Path, baseline: Path, thresholds: Path | None, machine_name: str | None) -> "GateView":
    from benchbox.analysis.ratios import gate_ratios
    from benchbox.errors import ConfigurationError
    from benchbox.report.gate.view import GateView
    from benchbox.store.benchmarks import read_benchmarks

    if thresholds is not None:
        raise ConfigurationError("--thresholds is for runs: ratios of benchmarks are checked against their baseline")
    return GateView(path=str(path), rows=gate_ratios(read_benchmarks(path), baseline, machine_name))


def _print(view: "GateView", output: GateFormat) -> None:
    from rich.console import Console

    from benchbox.report.gate.as_json import render_gate_json
    from benchbox.report.gate.github import render_gate_github
    from benchbox.report.gate.junit import render_gate_junit
    from benchbox.report.gate.sarif import render_gate_sarif
    from benchbox.report.gate.text import print_gate

    match output:
        case GateFormat.text:
            print_gate(view, Console())
        case GateFormat.json:
            typer.echo(render_gate_json(view), nl=False)
        case GateFormat.junit:
            typer.echo(render_gate_junit(view))
        case GateFormat.sarif:
            typer.echo(render_gate_sarif(view), nl=False)
        case GateFormat.github:
            typer.echo(render_gate_github(view), nl=False)


@baselines.command()
def promote(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run directory, or JSON of pytest-benchmark of several runs.")
    ],
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Folder of the baseline; by default named after the machine. `check` takes it too."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the baselines.")] = BASELINES,
) -> None:
    """Make a run the baseline of its matrix on its machine. Refused (exit code 4) unless every planned launch ended ok.

    Of pytest-benchmark, name the JSON files of five or more runs of the tests: their spread says what chance may do. An earlier
    baseline among the files counts as the runs that it was made of.
    """
    from benchbox.analysis.baseline import make_baseline, name_machine
    from benchbox.analysis.quantities import counted
    from benchbox.analysis.summary import summarize
    from benchbox.errors import ConfigurationError
    from benchbox.store.baseline import baseline_path, write_baseline
    from benchbox.store.benchmarks import is_benchmarks
    from benchbox.store.run import RunStore

    if any(is_benchmarks(path) for path in paths):
        _promote_benchmarks(paths, machine, out)
        return
    if len(paths) > 1:
        raise ConfigurationError("a baseline is made of one run; several files are for JSON of pytest-benchmark")
    store = RunStore(paths[0])
    run, records = store.run(), list(store.records())
    name = name_machine(records, machine)
    baseline = make_baseline(run, summarize(run, records), name)
    target = baseline_path(out, name, run.name)
    write_baseline(target, baseline)
    typer.echo(f"{target}: {counted(len(baseline.cells), 'cell')}; commit it, and `benchbox check` compares with it")


def _promote_benchmarks(paths: list[Path], machine: str | None, out: Path) -> None:
    from dataclasses import replace

    from benchbox.analysis.baseline import slug
    from benchbox.analysis.ratios import BASELINE_NAME, merge_runs
    from benchbox.store.baseline import baseline_path
    from benchbox.store.benchmarks import read_benchmarks, write_benchmarks_baseline

    merged = merge_runs([read_benchmarks(path) for path in paths])
    merged = replace(merged, machine=slug(merged.machine))
    target = baseline_path(out, slug(machine or merged.machine), BASELINE_NAME)
    write_benchmarks_baseline(target, merged)
    text = f"{len(merged.ratios)} ratios of {len(merged.started_at)} runs of the tests"
    typer.echo(f"{target}: {text}; commit it, and `benchbox check` compares with it")
