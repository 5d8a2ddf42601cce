"""Comparison of a launch record with the files that its ranks wrote: their results and their events."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from benchbox.errors import RecordError
from benchbox.registry.host_load import may_be_busy
from benchbox.spec.cell import Cell, MeasureSpec
from benchbox.store.assemble import assemble_record
from benchbox.store.events import read_events
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.events import RankEvent
    from benchbox.store.rank_result import RankResult

_ON_NODE = re.compile(r" \(on node \d+\)$")
_OF_JOB = ("warmup_steps", "steps", "memory_limit_bytes")

# Keys of a record that are made of the job, of the results of ranks and of nothing else
_MERGED = (
    *_OF_JOB,
    "status",
    "observed",
    "step_time_s",
    "step_split_s",
    "phases_s",
    "throughput",
    "memory",
    "collectives",
    "flops",
    "mfu",
    "hfu",
    "host",
    "samples",
    "loss",
    "grad_norm",
)

# Statuses that only the report of a rank gives a launch, whose error is that report
_REPORTED = ("oom", "nan", "unsupported")

# An event is written after its step: the writing lies between two events, and is no part of a step.
EVENT_TOLERANCE_S = 0.010
EVENT_SHARE = 0.10


def as_ranks_wrote(record: LaunchRecord, folder: Path) -> list[str] | None:
    """Return what differs from the record that the results of the ranks give, or None where there are no such files."""
    world_size = record["cell"]["world_size"]
    paths = [folder / f"rank{rank}.json" for rank in range(world_size)]
    if not any(path.is_file() for path in paths):
        return None
    results = []
    for path in paths:
        try:
            results.append(cast("RankResult", read_json(path)))
        except RecordError as error:
            if record["status"] == "ok":
                return [f"ok, and a result is missing: {error}"]
    job = folder / "job.json"
    measure = MeasureSpec(
        warmup_steps=record["warmup_steps"], steps=record["steps"], memory_limit=record.get("memory_limit_bytes")
    )
    rebuilt: Any = assemble_record(
        cell=Cell.from_dict(dict(record["cell"])),
        launch=record["launch"],
        measure=MeasureSpec.from_dict(read_json(job)["measure"]) if job.is_file() else measure,
        rank_results=results,
        status=record["status"],
        error=record["error"],
        started_at=record["started_at"],
        duration_s=record["duration_s"],
        environment=None,
        precision=None,
    )
    recorded: Any = record
    different = [key for key in _MERGED if key in recorded and recorded[key] != rebuilt[key]]
    environment, of_ranks = recorded["environment"] or {}, rebuilt["environment"] or {}
    different += [f"environment.{key}" for key, value in of_ranks.items() if environment.get(key) != value]
    return [f"{key} differs from the {'job' if key in _OF_JOB else 'results'} of its ranks" for key in different]


def errors_agree(record: LaunchRecord, folder: Path) -> list[str] | None:
    """Return how the error of a launch contradicts what its ranks reported, or None without events or such an error."""
    error = record["error"]
    paths = [folder / f"events-rank{rank}.jsonl" for rank in range(record["cell"]["world_size"])]
    if record["status"] not in _REPORTED or error is None or not any(path.is_file() for path in paths):
        return None
    reported: list[Any] = [event for path in paths for event in read_events(path)[0] if event["event"] == "error"]
    # The launcher shortens a traceback, and of several nodes names that of the rank behind its message.
    message = _ON_NODE.sub("", error["message"])
    unchanged = {key: value for key, value in error.items() if key not in ("traceback", "message")}
    recorded = {"status": record["status"], **unchanged}
    for event in reported:
        if event.get("message") in (message, error["message"]) and recorded.items() <= {**event}.items():
            return []
    where = f"{error['type']} on rank {error['rank']} in {error.get('stage')} step {error.get('step')}, {error['phase']}"
    return [f"{record['status']} by {where}: its ranks did not report this error"]


def events_agree(record: LaunchRecord, folder: Path) -> list[str] | None:
    """Return how step times contradict the events of the ranks, or None without events or where the launch is not ok."""
    times, observed = record["step_time_s"], record["observed"]
    paths = [folder / f"events-rank{rank}.jsonl" for rank in range(record["cell"]["world_size"])]
    if record["status"] != "ok" or times is None or observed is None or not any(path.is_file() for path in paths):
        return None
    messages = []
    for rank, path in enumerate(paths):
        events, _ = read_events(path)
        if not events or events[-1]["event"] != "done":
            messages.append(f"rank {rank}: ok, and its last event is not done")
            continue
        span = events[-1]["monotonic_s"] - events[0]["monotonic_s"]
        if span > record["duration_s"]:
            messages.append(f"rank {rank}: events over {span:.3f} s, and the launch took {record['duration_s']:.3f} s")
        # A GPU runs behind the process that writes the events.
        if observed["device"][rank] == "cpu":
            is_quiet = not may_be_busy(record)
            messages += [f"rank {rank}: {text}" for text in _step_problems(events, times["per_rank"][rank], is_quiet=is_quiet)]
    return messages


def _step_problems(events: Sequence[RankEvent], steps: Sequence[float], *, is_quiet: bool) -> Iterator[str]:
    moments = [e["monotonic_s"] for e in events if e["event"] == "progress" and e.get("stage") == "measure"]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    if len(gaps) != len(steps):
        yield f"{len(steps)} step times, and events of {len(gaps)} steps"
        return
    for step, (gap, time_s) in enumerate(zip(gaps, steps, strict=True)):
        if time_s > gap:
            yield f"step {step} took {time_s:.4f} s, and {gap:.4f} s lie between its events"
    # On a busy host, others may run between the end of a step and its event.
    if is_quiet and sum(gaps) > (1 + EVENT_SHARE) * sum(steps) + EVENT_TOLERANCE_S * len(steps):
        yield f"the steps took {sum(steps):.4f} s, and their events {sum(gaps):.4f} s"
