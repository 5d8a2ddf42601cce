"""Invariants of a run as a whole: plan, chain, files of ranks, events, tables and ratios agree with the records."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from benchbox.analysis.comparability import compare_with_reference
from benchbox.analysis.rank_file_invariants import as_ranks_wrote, events_agree
from benchbox.analysis.sequential import criteria_of
from benchbox.analysis.summary import summarize
from benchbox.analysis.walk_invariants import follow_from_launches, monotonic
from benchbox.errors import BenchboxError
from benchbox.spec.cell import Cell
from benchbox.store.chain import content_sha256, plan_sha256
from benchbox.store.files import read_json
from benchbox.store.table import table_differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import RunStore

_CLOCK_STEP = timedelta(seconds=2)  # by which the wall clock may have been set back between two launches
_RATIO = re.compile(r"[0-9]+\.[0-9]{2}x")


@dataclass(frozen=True, slots=True)
class RunInvariant:
    """A statement on a run, and a check that returns violations with their record, or None where it does not apply."""

    sentence: str
    check: Callable[[RunStore, Sequence[LaunchRecord]], Iterable[tuple[LaunchRecord | None, str]] | None]


def _plan(store: RunStore, records: Sequence[LaunchRecord]) -> Iterator[tuple[LaunchRecord | None, str]]:
    cells = store.run().cells
    for cell_id, cell in cells.items():
        if (expected := Cell.from_dict(dict(cell)).cell_id) != cell_id:
            yield None, f"run.json: the configuration of cell {cell_id} has the id {expected}"
    for record in records:
        if Cell.from_dict(dict(record["cell"])) != Cell.from_dict(dict(cells[record["cell_id"]])):
            yield record, "its cell is not that of the plan"


def _same_cell(_: RunStore, records: Sequence[LaunchRecord]) -> Iterator[tuple[LaunchRecord | None, str]]:
    """Yield launches that differ from an earlier one of their cell, by the same sources, in what has no noise."""
    first: dict[tuple[str, ...], tuple[LaunchRecord, dict[str, object]]] = {}
    for record in records:
        observed, flops, environment = record["observed"], record["flops"], record["environment"] or {}
        if record["status"] != "ok" or observed is None:
            continue
        sources = (record["cell_id"], *(str(environment.get(name)) for name in ("benchbox_sha256", "policy_sha256", "torch")))
        values: dict[str, object] = {
            name: observed.get(name) for name in ("model_class", "sharding", "shard_numel", "trainable_numel", "total_numel")
        }
        values["FLOPs"] = flops["model_flops_per_step"] if flops else None
        other, expected = first.setdefault(sources, (record, values))
        for name, value in values.items():
            if value != expected[name]:
                yield record, f"{name} is {value}, and {expected[name]} in launch {other['launch']}"


def _one_after_another(_: RunStore, records: Sequence[LaunchRecord]) -> Iterator[tuple[LaunchRecord | None, str]]:
    by_start = sorted(records, key=lambda record: record["started_at"])
    for earlier, later in pairwise(by_start):
        start, end = (datetime.fromisoformat(record["started_at"]) for record in (later, earlier))
        end += timedelta(seconds=earlier["duration_s"])
        if start < end - _CLOCK_STEP:
            message = f"it started {(end - start).total_seconds():.1f} s before launch {earlier['launch']} of"
            yield later, f"{message} {earlier['cell_id']} ended"


def _chain(store: RunStore, records: Sequence[LaunchRecord]) -> Iterable[tuple[LaunchRecord | None, str]] | None:
    return list(_chain_problems(store, records)) if store.chain.exists() else None


def _chain_problems(store: RunStore, records: Sequence[LaunchRecord]) -> Iterator[tuple[LaunchRecord | None, str]]:
    reading = store.chain.read()
    if reading.defect:
        yield None, f"chain.jsonl: {reading.defect}"
        return
    history: dict[tuple[str, int], list[str | None]] = defaultdict(list)
    plans = []
    for entry in reading.entries:
        if entry["kind"] == "plan":
            plans.append(entry["sha256"])
        else:
            history[entry["cell_id"], entry["launch"]].append(entry["sha256"])
    if plans[-1:] != [plan_sha256(read_json(store.path / "run.json"))]:
        yield None, "run.json is not the plan of the last run: it was edited"
    for record in records:
        sha256, known = content_sha256(record), history.pop((record["cell_id"], record["launch"]), [])
        if sha256 in known[:-1] and sha256 != known[-1]:
            yield record, "an earlier record of this launch: the last one was removed, or the run was killed before writing it"
        elif sha256 not in known:
            yield record, "edited after it was measured" if known else "not measured by this run: the chain does not have it"
    planned = store.run().cells
    for (cell_id, launch), known in history.items():
        if known[-1] is not None and cell_id in planned:
            yield None, f"the record of launch {launch} of {cell_id} was removed, or the run was killed before writing it"


def _rank_files(store: RunStore, records: Sequence[LaunchRecord]) -> Iterable[tuple[LaunchRecord | None, str]] | None:
    problems = [(record, as_ranks_wrote(record, store.launch_dir(record["cell_id"], record["launch"]))) for record in records]
    known = [(record, messages) for record, messages in problems if messages is not None]
    return [(record, message) for record, messages in known for message in messages] if known else None


def _events(store: RunStore, records: Sequence[LaunchRecord]) -> Iterable[tuple[LaunchRecord | None, str]] | None:
    problems = [(record, events_agree(record, store.launch_dir(record["cell_id"], record["launch"]))) for record in records]
    known = [(record, messages) for record, messages in problems if messages is not None]
    return [(record, message) for record, messages in known for message in messages] if known else None


def _is_current(store: RunStore, name: str, records: Sequence[LaunchRecord]) -> bool:
    """Return whether a file that is made of the records exists and is not older than any of them."""
    path = store.path / name
    if not path.is_file():
        return False
    if store.is_packed:
        return True
    made = path.stat().st_mtime
    return all(store.record_path(record["cell_id"], record["launch"]).stat().st_mtime <= made for record in records)


def _tables(store: RunStore, records: Sequence[LaunchRecord]) -> Iterable[tuple[LaunchRecord | None, str]] | None:
    names = [name for name in ("table.csv", "table.parquet") if _is_current(store, name, records)]
    messages = [(None, f"{name}: {text}") for name in names for text in table_differences(store.path / name, records)]
    return messages if names else None


def _ratios(store: RunStore, records: Sequence[LaunchRecord]) -> Iterable[tuple[LaunchRecord | None, str]] | None:
    run = store.run()
    if not run.reference or not _is_current(store, "report.md", records):
        return None
    printed = list(_printed_ratios((store.path / "report.md").read_text(encoding="utf-8").splitlines()))
    summaries = summarize(run, records)
    comparisons = compare_with_reference(summaries, run.reference, run.matrix.get("axes") or {}, criteria_of(run))
    if len(printed) != len(summaries):
        return [(None, f"report.md: {len(printed)} rows of cells, of {len(summaries)}")]
    messages: list[tuple[LaunchRecord | None, str]] = []
    for summary, text in zip(summaries, printed, strict=True):
        comparison = comparisons.get(summary.cell_id)
        expected = f"{comparison.ratio:.2f}x" if comparison is not None and comparison.ratio is not None else None
        if text != expected:
            messages.append((None, f"report.md: the ratio of cell {summary.cell_id} is {text}, its records give {expected}"))
    return messages


def _printed_ratios(lines: Sequence[str]) -> Iterator[str | None]:
    """Yield the ratio of each row of the table of cells in a Markdown report, None for a row without one."""
    rows = iter(lines)
    header = next((line for line in rows if "| vs reference |" in line), None)
    if header is None:
        return
    column = header.split(" | ").index("vs reference")
    next(rows)
    for row in rows:
        if not row.startswith("|"):
            return
        ratio = _RATIO.match(re.split(r"(?<!\\) \| ", row)[column])
        yield ratio[0] if ratio else None


RUN_INVARIANTS = (
    RunInvariant("cells of records are those of the plan", _plan),
    RunInvariant("launches of a cell have the same shards, sizes and FLOPs", _same_cell),
    RunInvariant("launches ran one after another", _one_after_another),
    RunInvariant("records are those that the chain has", _chain),
    RunInvariant("records are what their ranks wrote", _rank_files),
    RunInvariant("step times agree with the events of the ranks", _events),
    RunInvariant("tables are those of the records", _tables),
    RunInvariant("ratios of the report follow from the records", _ratios),
    RunInvariant("no batch of a walk fits above one that does not", monotonic),
    RunInvariant("a walk that has ended has both launches of its certificate", follow_from_launches),
)


def check_run(
    invariant: RunInvariant, store: RunStore, records: Sequence[LaunchRecord]
) -> list[tuple[LaunchRecord | None, str]] | None:
    """Return the violations of one invariant with their records, or None where it does not apply."""
    try:
        problems = invariant.check(store, records)
        return None if problems is None else list(problems)
    except (BenchboxError, AttributeError, AssertionError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        # A run that cannot even be checked was damaged or edited: that is a violation, not an internal error.
        return [(None, f"malformed ({type(error).__name__}: {error})")]
