"""Making a baseline of a complete run, finding the one to compare with, and the name of the machine it was measured on."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any

from benchbox import __version__
from benchbox.analysis.certificates import certificates
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.run_environments import (
    environments_by_ranks,
    latest_environment,
    mixed_environment,
    run_differences,
    steps_difference,
)
from benchbox.analysis.summary import label, varying_fields
from benchbox.errors import RecordError, ThresholdError
from benchbox.registry.metrics import metric_by_name, metrics
from benchbox.spec.cell import Cell
from benchbox.store.baseline import Baseline, baseline_path, read_baseline

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchbox.analysis.summary import CellSummary, Spread
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import Run


def machine_folder(records: Iterable[LaunchRecord]) -> str:
    """Return the folder of the machine that records were measured on, named as the measuring processes named it.

    Raises:
        RecordError: no record names a machine, or they name several.
    """
    names = {name for record in records if (name := (record["environment"] or {}).get("machine"))}
    if not names:
        raise RecordError("no launch of this run recorded its machine; name it: --machine NAME")
    if len(names) > 1:
        raise RecordError(f"the launches of this run were measured on several machines: {', '.join(sorted(names))}")
    return slug(str(names.pop()))


def name_machine(records: Iterable[LaunchRecord], given: str | None) -> str:
    """Return the folder of a machine's baselines: the name that the user gave it, or that of the machine.

    Raises:
        RecordError: see `machine_folder`.
    """
    return slug(given) if given else machine_folder(records)


def slug(name: str) -> str:
    """Return a name that is safe as a folder on every system."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "machine"


def make_baseline(run: Run, summaries: Sequence[CellSummary], machine: str) -> Baseline:
    """Return the baseline of a run in which every planned launch ended ok.

    Raises:
        ThresholdError: a cell failed or is missing, or a walk does not show its largest batch: a baseline with holes would
            make later failures look expected. Or launches were not all measured with the same versions.
    """
    holes = [summary for summary in summaries if not summary.complete]
    if holes or not summaries:
        fields = varying_fields(summary.cell for summary in summaries)
        example = f": {label(holes[0].cell, fields)} is {holes[0].status}" if holes else ""
        raise ThresholdError(
            f"a baseline needs a complete run, and {len(holes)} of {len(summaries)} cells are not ok in all "
            f"{run.launches} launches{example}"
        )
    for result in certificates(run, summaries):
        if not result.is_conclusive:
            others = [field for field in varying_fields(summary.cell for summary in summaries) if field != "batch"]
            cell = label(result.batches[0].cell, others)
            raise ThresholdError(f"a baseline needs walks that show their largest batch: {cell}: {result.reason}")
    if mixed := mixed_environment(record for summary in summaries for record in summary.records):
        raise ThresholdError(f"{'; '.join(mixed.values())}: measure all anew, `benchbox run {run.matrix_file} --fresh`")
    summaries = [summary for summary in summaries if not summary.beyond_memory]
    records = [record for summary in summaries for record in summary.records]
    searched = {cell_id: {"at_most": walk["at_most"]} for walk in run.walks for cell_id in walk["cells"]}
    cells = {
        summary.cell_id: {
            "cell": dict(summary.cell),
            "values": {name: _values(summary, name, spread) for name, spread in summary.values.items()},
            "walk": searched.get(summary.cell_id),
        }
        for summary in summaries
    }
    return Baseline(
        machine=machine,
        matrix=run.name,
        promoted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        benchbox_version=__version__,
        measure=dict(run.measure),
        environment=dict(latest_environment(records)),
        environments={str(ranks): dict(environment) for ranks, environment in environments_by_ranks(records).items()},
        cells=cells,
        started_at=tuple(sorted(record["started_at"] for record in records)),
    )


def _values(summary: CellSummary, name: str, spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    by_launch = {str(number): value for number, value in summary.by_launch(metric_by_name(name)).items()}
    return {**asdict(spread), "by_launch": by_launch}


def baseline_problems(baseline: Baseline) -> list[str]:
    """Return contradictions within a baseline: wrong ids of cells, and values that their launches do not give."""
    problems = []
    for cell_id, entry in baseline.cells.items():
        try:
            is_own = Cell.from_dict(dict(entry["cell"])).cell_id == cell_id
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problems.append(f"cell {cell_id}: malformed ({type(error).__name__}: {error})")
            continue
        if not is_own:
            problems.append(f"cell {cell_id}: the id is not the hash of its configuration")
        for name, value in entry["values"].items():
            launches = baseline.by_launch(cell_id, name)
            if not launches or value is None or name not in metrics():
                continue
            metric, figures = metrics()[name], list(launches.values())
            worst = min(figures) if metric.direction == "higher" else max(figures)
            expected = worst if metric.launches == "worst" else median(figures)
            stored = (value["value"], value["low"], value["high"], value["launches"])
            if stored != (expected, min(figures), max(figures), len(figures)):
                problems.append(f"cell {cell_id}: {name} is {value['value']}, its launches give {expected}")
    return problems


def find_baseline(run: Run, records: Sequence[LaunchRecord], location: Path, machine_name: str | None = None) -> BaselineLookup:
    """Find the baseline to compare a run with: the file `location`, or in that folder the one of the run's machine.

    There is none when the run was measured on another machine than the baseline: two machines are not a regression. Nor is
    there one when the baseline has launches of this run: it would be compared with itself.

    Args:
        machine_name: the name of the machine's folder in `location`, if it is not its own.

    Raises:
        RecordError: the file exists and is not a baseline, or a file was named that does not exist.
    """
    try:
        folder = name_machine(records, machine_name)
    except RecordError as error:
        return BaselineLookup(None, str(error))
    path = location
    if location.suffix != ".json":
        path = baseline_path(location, folder, run.name)
        if not path.is_file():
            return BaselineLookup(None, f"no baseline {path}; promote a run you trust: benchbox baseline promote RUN")
    baseline = read_baseline(path)
    measured_on = slug(str(baseline.environment.get("machine")))
    machine = slug(str(latest_environment(records).get("machine")))
    if measured_on != machine:
        return BaselineLookup(None, f"{path} was measured on {measured_on}, and this run on {machine}: not comparable")
    if shared := set(baseline.started_at) & {record["started_at"] for record in records}:
        remedy = f"{path} was promoted from this run ({len(shared)} launches are the same): measure another run to compare"
        return BaselineLookup(None, remedy)
    different = [*mixed_environment(records).values()]
    different += run_differences(environments_by_ranks(records), baseline.environment_by_ranks).values()
    different += filter(None, [steps_difference(run.measure, baseline.measure)])
    if different:
        texts = "; ".join(different)
        remedy = f"{path} is not like for like with this run: {texts}: promote a run of today's versions and steps"
        return BaselineLookup(None, remedy)
    return BaselineLookup(baseline, None)
