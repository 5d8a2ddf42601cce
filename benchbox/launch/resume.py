"""Selection of the launches of a plan that are still to be run, with the reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.launch.changed_environment import changed_library, other_launcher, other_machine
from benchbox.launch.fingerprint import benchbox_sha256, data_sha256, policy_sha256
from benchbox.registry.statuses import STATUSES
from benchbox.store.chain import content_sha256

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from benchbox.launch.job import Launcher
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.run import RunStore

Launches = list[tuple["Cell", int]]


@dataclass(frozen=True, slots=True)
class PendingLaunches:
    """The launches to run, the number of those whose record is reused, and lines on both.

    A line says why some are measured again, or that some which are reused are of another machine or launcher.
    """

    launches: Launches
    reused: int
    notes: list[str]


def pending_launches(
    launches: Sequence[tuple[Cell, int]],
    measure: MeasureSpec,
    store: RunStore,
    policy_dirs: Sequence[Path],
    *,
    fresh: bool = False,
    final: Collection[str] = ("ok",),
    launcher: Launcher | None = None,
) -> PendingLaunches:
    """Select the launches that have no record, or one that failed or is outdated; with `fresh`, all of them.

    Args:
        final: statuses of launches that need not be repeated.
        launcher: that will run them, where it is known.

    Raises:
        RecordError: a record cannot be read, and which.
        ConfigurationError: a policy does not exist.
    """
    if fresh:
        return PendingLaunches(list(launches), 0, [])
    reasons: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    pending: Launches = []
    policies = {policy: policy_sha256(policy, policy_dirs) for policy in {cell.policy for cell, _ in launches}}
    data = {spec: data_sha256(spec) for spec in {cell.data for cell, _ in launches}}
    chained = store.chain.sha256_by_launch()
    for cell, launch in launches:
        record = store.record(cell.cell_id, launch)
        key, reason = (cell.cell_id, launch), None
        if record is not None:
            reason = _why_failed(record, final) or _why_outdated(record, measure, policies[cell.policy], data[cell.data])
            if reason is None and key in chained and chained[key] != content_sha256(record):
                reason = "its record is not the last one that was measured"
        if reason is not None:
            reasons[reason] += 1
        if record is None or reason is not None:
            pending.append((cell, launch))
            continue
        environment = record["environment"] or {}
        if key not in chained:
            elsewhere["whose records no intact chain.jsonl has: verify refuses them"] += 1
        elif (difference := other_machine(environment)) is not None:
            elsewhere[f"of another machine: {difference}"] += 1
        elif launcher is not None and (difference := other_launcher(environment, launcher, cell.world_size)) is not None:
            elsewhere[f"not comparable with new ones: {difference}"] += 1
    notes = [f"measuring {count} launch{'es' if count > 1 else ''} again: {reason}" for reason, count in reasons.items()]
    for difference, count in elsewhere.items():
        notes.append(f"reusing {count} launch{'es' if count > 1 else ''} {difference}; --fresh repeats them")
    return PendingLaunches(pending, len(launches) - len(pending), notes)


def remove_outdated_launches(
    launches: Sequence[tuple[Cell, int]], measure: MeasureSpec, store: RunStore, policy_dirs: Sequence[Path]
) -> str | None:
    """Remove records of further launches of these cells, left by a command that asked for more, if they are outdated.

    They would be among the figures of the cell, though they were not measured as its launches are now.

    Returns:
        a line that says how many, or None.

    Raises:
        RecordError: a record cannot be read, and which.
        ConfigurationError: a policy does not exist.
    """
    asked = {(cell.cell_id, launch) for cell, launch in launches}
    cells = {cell.cell_id: cell for cell, _ in launches}
    stored = [(record["cell_id"], record["launch"]) for record in store.records() if record["cell_id"] in cells]
    further = [(cells[cell_id], launch) for cell_id, launch in stored if (cell_id, launch) not in asked]
    outdated = pending_launches(further, measure, store, policy_dirs, final=STATUSES).launches
    for cell, launch in outdated:
        store.remove_record(cell.cell_id, launch)
    if not outdated:
        return None
    count = len(outdated)
    return f"removing {count} further launch{'es' if count > 1 else ''}, which an earlier command measured"


def _why_failed(record: LaunchRecord, final: Collection[str]) -> str | None:
    return None if record["status"] in final else f"it ended {record['status']} last time"


def _why_outdated(record: LaunchRecord, measure: MeasureSpec, policy_fingerprint: str, data: str | None) -> str | None:
    """Return the reason why an ok record is no longer valid for its launch, or None."""
    if (record["warmup_steps"], record["steps"]) != (measure.warmup_steps, measure.steps):
        recorded = f"{record['steps']} steps after {record['warmup_steps']} of warm-up"
        return f"{recorded} were measured, and {measure.steps} after {measure.warmup_steps} are asked for"
    if record.get("memory_limit_bytes") != measure.memory_limit:
        return "it was measured under another memory limit"
    environment = record["environment"] or {}
    if environment.get("benchbox_sha256") != benchbox_sha256():
        return "benchbox itself has changed since"
    if environment.get("policy_sha256") != policy_fingerprint:
        return f"the sources of policy {record['cell']['policy']} have changed since"
    if environment.get("data_sha256", data) != data:  # older records lack it
        return "the metadata of its data, or its tokenizer, have changed since"
    return changed_library(environment)
