"""Which launches of a plan are still to be run, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.launch.fingerprint import policy_sha256

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.run import RunStore

Launches = list[tuple["Cell", int]]


@dataclass(frozen=True, slots=True)
class PendingLaunches:
    """What to run, how many launches are kept as they are, and a line for every reason to measure something again."""

    launches: Launches
    kept: int
    notes: list[str]


def pending_launches(
    launches: Sequence[tuple[Cell, int]], measure: MeasureSpec, store: RunStore, policy_dirs: Sequence[Path], *, fresh: bool
) -> PendingLaunches:
    """A launch is kept when its record is ok and still speaks for it; with `fresh`, none is.

    Raises:
        RecordError: a record cannot be read, and which.
        ConfigurationError: a policy does not exist.
    """
    if fresh:
        return PendingLaunches(list(launches), 0, [])
    again: Counter[str] = Counter()
    left: Launches = []
    current = {policy: policy_sha256(policy, policy_dirs) for policy in {cell.policy for cell, _ in launches}}
    for cell, launch in launches:
        record = store.record(cell.cell_id, launch)
        reason = None
        if record is not None:
            reason = _failed(record) or _outdated(record, measure, current[cell.policy])
        if reason is not None:
            again[reason] += 1
        if record is None or reason is not None:
            left.append((cell, launch))
    notes = [f"measuring {count} launch{'es' if count > 1 else ''} again: {reason}" for reason, count in again.items()]
    return PendingLaunches(left, len(launches) - len(left), notes)


def _failed(record: Mapping[str, Any]) -> str | None:
    return None if record["status"] == "ok" else f"it ended {record['status']} last time"


def _outdated(record: Mapping[str, Any], measure: MeasureSpec, sources: str) -> str | None:
    """Why an ok record does not speak for its launch any more."""
    if (record["warmup_steps"], record["steps"]) != (measure.warmup_steps, measure.steps):
        then = f"{record['steps']} steps after {record['warmup_steps']} of warm-up"
        return f"{then} were measured, and {measure.steps} after {measure.warmup_steps} are asked for"
    if (record["environment"] or {}).get("policy_sha256") != sources:
        return f"the sources of policy {record['cell']['policy']} have changed since"
    return None
