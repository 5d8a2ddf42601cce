"""Invariants of walks: what launches show of the largest batch does not contradict itself, and the plan says what they show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchbox.analysis.certificates import certificates
from benchbox.analysis.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import Run, RunStore

Messages = list[tuple["LaunchRecord | None", str]]


def monotonic(store: RunStore, records: Sequence[LaunchRecord]) -> Messages | None:
    """Return the launches of a walk that fit above one that ran out of memory."""
    run = store.run()
    if not run.walks:
        return None
    messages: Messages = []
    for walk in run.walks:
        of_walk = [record for record in records if record["cell_id"] in walk["cells"]]
        failed = [record for record in of_walk if record["status"] == "oom"]
        smallest = min(failed, key=_batch, default=None)
        for record in of_walk:
            if smallest is not None and record["status"] == "ok" and _batch(record) >= _batch(smallest):
                message = f"batch {_batch(record)} fits, and batch {_batch(smallest)} ran out of memory"
                messages.append((record, f"{message} in launch {smallest['launch']} of {smallest['cell_id']}"))
    return messages


def _batch(record: LaunchRecord) -> int:
    return int(record["cell"]["batch"])


def follow_from_launches(store: RunStore, records: Sequence[LaunchRecord]) -> Iterable[tuple[LaunchRecord | None, str]] | None:
    """Return walks whose plan says something else than their launches, or that ended without both launches of a certificate."""
    run = store.run()
    return list(_plan_problems(run, records)) if run.walks else None


def _plan_problems(run: Run, records: Sequence[LaunchRecord]) -> Iterator[tuple[LaunchRecord | None, str]]:
    results = certificates(run, summarize(run, records))
    for walk, result in zip(run.walks, results, strict=True):
        first, *others = walk["cells"]
        point = _point(run, first)
        for cell_id in others:
            if _point(run, cell_id) != point:
                yield None, f"run.json: {cell_id} differs from {first} of its walk in more than the batch"
        if walk["fastest"] is None:
            continue
        if result.outcome not in ("complete", "capped"):
            yield None, f"the walk of {first} ended, and its launches do not show it: {result.reason}"
        fastest = result.fastest.cell_id if result.fastest else None
        if fastest != walk["fastest"]:
            yield None, f"run.json: the fastest batch of the walk of {first} is {walk['fastest']}, by its launches {fastest}"


def _point(run: Run, cell_id: str) -> str:
    return json.dumps({**run.cells[cell_id], "batch": None}, sort_keys=True)
