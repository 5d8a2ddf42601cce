"""What must be true of every launch record, whoever wrote it. `benchbox verify` holds a run against this list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose
from statistics import median
from typing import Any

Record = Mapping[str, Any]

PHASE_SUM_TOLERANCE = 0.02
FLOPS_TOLERANCE = 0.01
_MUST_BE_KNOWN = ("observed", "step_time_s", "phases_s", "throughput", "memory", "loss", "grad_norm", "environment")


@dataclass(frozen=True, slots=True)
class Invariant:
    """A sentence, and how to find what breaks it. `check` is None-returning where the record has nothing to hold it against."""

    sentence: str
    check: Callable[[Record], Iterable[str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One way in which one record breaks one invariant."""

    cell_id: str
    launch: int
    sentence: str
    found: str


@dataclass(frozen=True, slots=True)
class Examination:
    """Every invariant over all records: how often it held, how often there was nothing to check, and each violation."""

    held: Mapping[str, int]
    not_applicable: Mapping[str, int]
    violations: tuple[Violation, ...]


def examine(records: Iterable[Record]) -> Examination:
    """Hold records against every invariant."""
    held = {invariant.sentence: 0 for invariant in INVARIANTS}
    idle = dict(held)
    violations: list[Violation] = []
    for record in records:
        for invariant in INVARIANTS:
            try:
                result = invariant.check(record)
                found = [] if result is None else list(result)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                # A record that cannot even be checked has been damaged or edited; that is a violation, not our crash.
                result = found = [f"malformed ({type(error).__name__}: {error})"]
            if result is None:
                idle[invariant.sentence] += 1
            elif not found:
                held[invariant.sentence] += 1
            where = {"cell_id": record["cell_id"], "launch": record["launch"], "sentence": invariant.sentence}
            violations += [Violation(**where, found=text) for text in found]
    return Examination(held, idle, tuple(violations))


def _every_rank(record: Record) -> Iterable[str] | None:
    if record["status"] != "ok":
        return None
    world = record["cell"]["world_size"]
    lists = {"step_time_s": (record["step_time_s"] or {}).get("per_rank"), "memory": (record["memory"] or {}).get("per_rank")}
    lists |= {f"phases_s.{name}": phase["per_rank"] for name, phase in (record["phases_s"] or {}).items()}
    return [f"{name} has {len(ranks)} of {world} ranks" for name, ranks in lists.items() if ranks and len(ranks) != world]


def _world_size(record: Record) -> Iterable[str] | None:
    if not record["observed"]:
        return None
    seen, asked = record["observed"].get("world_size"), record["cell"]["world_size"]
    return [] if seen == asked else [f"observed {seen}, requested {asked}"]


def _nothing_unknown(record: Record) -> Iterable[str] | None:
    if record["status"] != "ok":
        return [] if record["error"] else ["not ok, and no error says why"]
    missing = [key for key in _MUST_BE_KNOWN if record[key] is None]
    missing += ["mfu"] if record["mfu"] is None and not record["mfu_reason"] else []
    memory = record["memory"] or {}
    unknown_peaks = [key for peak in memory.get("per_rank", []) for key, value in peak.items() if value is None]
    if unknown_peaks and not memory.get("reason"):
        missing.append(f"memory.{unknown_peaks[0]}")
    return [f"{key} is null without a reason" for key in missing]


def _reserved(record: Record) -> Iterable[str] | None:
    peaks = enumerate((record["memory"] or {}).get("per_rank", []))
    known = [(rank, peak) for rank, peak in peaks if None not in peak.values()]
    if not known:
        return None
    return [
        f"rank {rank}: {peak['reserved_peak_bytes']} bytes reserved, {peak['allocated_peak_bytes']} allocated"
        for rank, peak in known
        if peak["reserved_peak_bytes"] < peak["allocated_peak_bytes"]
    ]


def _phase_sum(record: Record) -> Iterable[str] | None:
    if not (record["phases_s"] and record["step_time_s"]):
        return None
    return _phase_gaps(record)


def _phase_gaps(record: Record) -> Iterator[str]:
    for rank, steps in enumerate(record["step_time_s"]["per_rank"]):
        whole = sum(steps)
        parts = sum(sum(phase["per_rank"][rank]) for phase in record["phases_s"].values())
        if abs(parts - whole) > PHASE_SUM_TOLERANCE * whole:
            yield f"rank {rank}: phases take {parts:.4f} s, steps {whole:.4f} s ({parts / whole - 1:+.1%})"


def _steps(record: Record) -> Iterable[str] | None:
    if record["status"] != "ok":
        return None
    counts = {len(steps) for steps in record["step_time_s"]["per_rank"]} | {len(record["step_time_s"]["slowest"])}
    wrong = [f"{count} step times, {record['steps']} steps" for count in counts if count != record["steps"]]
    curve = record["warmup_steps"] + record["steps"]
    return wrong + [f"{len(record[k])} of {curve} steps in {k}" for k in ("loss", "grad_norm") if len(record[k] or []) != curve]


def _samples(record: Record) -> Iterable[str] | None:
    if record["status"] != "ok" or record["samples"] is None:
        return None
    cell = record["cell"]
    expected = cell["batch"] * cell["accumulation"] * cell["world_size"] * record["steps"]
    counted = sum(record["samples"])
    return [] if counted == expected else [f"{counted} samples counted, {expected} expected"]


def _slowest(record: Record) -> Iterable[str] | None:
    times = record["step_time_s"]
    if not times:
        return None
    expected = [max(step) for step in zip(*times["per_rank"], strict=False)]
    return [] if times["slowest"] == expected else ["slowest is not the maximum over ranks of every step"]


def _throughput(record: Record) -> Iterable[str] | None:
    if not (record["throughput"] and record["step_time_s"]):
        return None
    cell, slowest = record["cell"], record["step_time_s"]["slowest"]
    expected = cell["batch"] * cell["accumulation"] * cell["world_size"] / median(slowest)
    found = record["throughput"]["global_samples_per_s"]
    return [] if isclose(found, expected, rel_tol=1e-9) else [f"{found:.6g} samples/s, the step times give {expected:.6g}"]


def _mfu(record: Record) -> Iterable[str] | None:
    if record["mfu"] is None:
        return None
    shares = {"MFU": record["mfu"], "HFU": record.get("hfu")}
    return [f"{name} {share:.3f}" for name, share in shares.items() if share is not None and not 0 <= share <= 1]


def _formula(record: Record) -> Iterable[str] | None:
    flops = record["flops"] or {}
    towers, counted = flops.get("per_tower"), flops.get("model_flops_per_step")
    if not towers or counted is None:
        return None
    model = sum(tower["forward"] + tower["backward"] for tower in towers.values())
    recomputed = sum(tower["recomputed"] for tower in towers.values())
    return [
        f"{seen:.6g} {what} FLOPs counted, {formula:.6g} by formula"
        for what, seen, formula in (("model", counted, model), ("recomputed", flops["recomputed_flops_per_step"], recomputed))
        if not isclose(seen, formula, rel_tol=FLOPS_TOLERANCE)
    ]


INVARIANTS = (
    Invariant("every rank is present", _every_rank),
    Invariant("the world size observed is the one requested", _world_size),
    Invariant("nothing is unknown without a reason", _nothing_unknown),
    Invariant("reserved >= allocated memory, on every rank", _reserved),
    Invariant(f"phases sum to the step within {PHASE_SUM_TOLERANCE:.0%}, on every rank", _phase_sum),
    Invariant("as many steps as asked for", _steps),
    Invariant("samples = batch x accumulation x ranks x steps", _samples),
    Invariant("slowest = maximum over ranks, step by step", _slowest),
    Invariant("throughput follows from the slowest rank's step times", _throughput),
    Invariant("MFU and HFU are between 0 and 1, or null", _mfu),
    Invariant(f"FLOPs counted are those of the formula within {FLOPS_TOLERANCE:.0%}", _formula),
)
