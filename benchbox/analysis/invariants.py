"""Invariants: statements that are true of every correct launch record. `benchbox verify` checks a run against this list."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isclose
from statistics import median
from typing import TYPE_CHECKING

from benchbox.analysis.invariant import Invariant, is_partly_frozen
from benchbox.analysis.observed_invariants import OBSERVED_INVARIANTS
from benchbox.analysis.plausible_invariants import PLAUSIBLE_INVARIANTS
from benchbox.analysis.run_invariants import RUN_INVARIANTS, RunInvariantCheck
from benchbox.analysis.unexplained_nulls import no_unexplained_null
from benchbox.registry.host_load import may_be_busy
from benchbox.store.record import samples_per_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from benchbox.analysis.run_invariants import RunInvariant
    from benchbox.registry.launch_record import LaunchRecord, Peak, Phase, StepTime, TowerFlops
    from benchbox.store.run import RunStore

PHASE_SUM_TOLERANCE = 0.02
FLOPS_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One way in which one record, or the run as a whole, breaks one invariant."""

    cell_id: str | None
    launch: int | None
    sentence: str
    message: str

    def __str__(self) -> str:
        where = "" if self.cell_id is None else f"{self.cell_id} launch {self.launch}: "
        return f"{where}{self.sentence}: {self.message}"


@dataclass(frozen=True, slots=True)
class Verification:
    """Result for all records: how often each invariant was satisfied, how often it did not apply, and every violation."""

    satisfied: Mapping[str, int]
    not_applicable: Mapping[str, int]
    violations: tuple[Violation, ...]
    records: int


def verify_records(records: Iterable[LaunchRecord]) -> Verification:
    """Check records against every invariant."""
    satisfied = {invariant.sentence: 0 for invariant in INVARIANTS}
    not_applicable = dict(satisfied)
    violations: list[Violation] = []
    count = 0
    for record in records:
        count += 1
        for invariant in INVARIANTS:
            try:
                result = invariant.check(record)
                messages = [] if result is None else list(result)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                # A record that cannot even be checked was damaged or edited: that is a violation, not an internal error.
                result = messages = [f"malformed ({type(error).__name__}: {error})"]
            if result is None:
                not_applicable[invariant.sentence] += 1
            elif not messages:
                satisfied[invariant.sentence] += 1
            violations += [
                Violation(cell_id=record["cell_id"], launch=record["launch"], sentence=invariant.sentence, message=message)
                for message in messages
            ]
    return Verification(satisfied, not_applicable, tuple(violations), count)


def verify_run(store: RunStore, further: Sequence[RunInvariant] = ()) -> Verification:
    """Check the records of a run against every invariant, and the files of the run against its records.

    Args:
        further: invariants besides `RUN_INVARIANTS`, such as those of its report.

    Raises:
        RecordError: the run or a record cannot be read.
    """
    invariants = (*RUN_INVARIANTS, *further)
    checks = [RunInvariantCheck(invariant, store) for invariant in invariants]
    verification = verify_records(_given_to(checks, store.records()))
    satisfied, not_applicable = dict(verification.satisfied), dict(verification.not_applicable)
    violations = list(verification.violations)
    for invariant, check in zip(invariants, checks, strict=True):
        problems = check.finish()
        satisfied[invariant.sentence] = int(problems == [])
        not_applicable[invariant.sentence] = int(problems is None)
        for key, message in problems or ():
            cell_id, launch = key or (None, None)
            violations.append(Violation(cell_id=cell_id, launch=launch, sentence=invariant.sentence, message=message))
    return replace(verification, satisfied=satisfied, not_applicable=not_applicable, violations=tuple(violations))


def _given_to(checks: Sequence[RunInvariantCheck], records: Iterable[LaunchRecord]) -> Iterator[LaunchRecord]:
    """Yield the records, each after it was given to the checks: none is held, so that any number of them can be checked."""
    for record in records:
        for check in checks:
            check.add(record)
        yield record


def _all_ranks_present(record: LaunchRecord) -> Iterable[str] | None:
    if record["status"] != "ok":
        return None
    world_size = record["cell"]["world_size"]
    step_time, memory = record["step_time_s"], record["memory"]
    sizes = {"step_time_s": len(step_time["per_rank"])} if step_time else {}  # what is missing has a rule of its own
    sizes |= {"memory": len(memory["per_rank"])} if memory else {}
    sizes |= {f"phases_s.{name}": len(phase["per_rank"]) for name, phase in (record["phases_s"] or {}).items()}
    sizes |= {} if record["samples"] is None else {"samples": len(record["samples"])}
    if host_state := record.get("host"):
        sizes |= {"host": len({rank for host in host_state["hosts"] for rank in host["ranks"]})}
    return [f"{name} has {size} of {world_size} ranks" for name, size in sizes.items() if size != world_size]


def _world_size(record: LaunchRecord) -> Iterable[str] | None:
    if not record["observed"]:
        return None
    observed, requested = record["observed"]["world_size"], record["cell"]["world_size"]
    return [] if observed == requested else [f"observed {observed}, requested {requested}"]


def _checked(record: LaunchRecord) -> Iterable[str] | None:
    if record["status"] != "ok":
        return None
    reason = record.get("unchecked_reason")
    return [reason] if reason else []


def _peaks(record: LaunchRecord) -> list[Peak]:
    return record["memory"]["per_rank"] if record["memory"] else []


def _reserved_covers_allocated(record: LaunchRecord) -> Iterable[str] | None:
    peaks = [
        (rank, reserved, allocated)
        for rank, peak in enumerate(_peaks(record))
        if (reserved := peak["reserved_peak_bytes"]) is not None and (allocated := peak["allocated_peak_bytes"]) is not None
    ]
    if not peaks:
        return None
    return [
        f"rank {rank}: {reserved} bytes reserved, {allocated} allocated"
        for rank, reserved, allocated in peaks
        if reserved < allocated
    ]


def _phase_sum(record: LaunchRecord) -> Iterable[str] | None:
    if not (record["phases_s"] and record["step_time_s"]):
        return None
    return _phase_gaps(record["phases_s"], record["step_time_s"], is_quiet=not may_be_busy(record))


def _phase_gaps(phases: Mapping[str, Phase], step_time: StepTime, *, is_quiet: bool) -> Iterator[str]:
    """Yield the ranks whose phases do not sum to their steps.

    On a busy host another process may get the core between two phases for longer than 2% of a short step. Phases that sum to
    too little are no error of the clock there.
    """
    for rank, steps in enumerate(step_time["per_rank"]):
        step_sum = sum(steps)
        phase_sum = sum(sum(phase["per_rank"][rank]) for phase in phases.values())
        lower = (1.0 - PHASE_SUM_TOLERANCE) * step_sum if is_quiet else 0.0
        if not lower <= phase_sum <= (1.0 + PHASE_SUM_TOLERANCE) * step_sum:
            yield f"rank {rank}: phases take {phase_sum:.4f} s, steps {step_sum:.4f} s ({phase_sum / step_sum - 1:+.1%})"


def _step_counts(record: LaunchRecord) -> Iterable[str] | None:
    if record["status"] != "ok":
        return None
    step_time = record["step_time_s"]
    if step_time is None:
        return ["step_time_s is null"]
    counts = {len(steps) for steps in step_time["per_rank"]} | {len(step_time["slowest"])}
    messages = [f"{count} step times, {record['steps']} steps" for count in counts if count != record["steps"]]
    total = record["warmup_steps"] + record["steps"]
    for name, series in (("loss", record["loss"]), ("grad_norm", record["grad_norm"])):
        if len(series or []) != total:
            messages.append(f"{len(series or [])} of {total} steps in {name}")
    return messages


def _samples(record: LaunchRecord) -> Iterable[str] | None:
    if record["status"] != "ok" or record["samples"] is None:
        return None
    expected = samples_per_step(record["cell"]) * record["steps"]
    counted = sum(record["samples"])
    return [] if counted == expected else [f"{counted} samples counted, {expected} expected"]


def _slowest(record: LaunchRecord) -> Iterable[str] | None:
    times = record["step_time_s"]
    if not times:
        return None
    expected = [max(step) for step in zip(*times["per_rank"], strict=False)]
    return [] if times["slowest"] == expected else ["slowest is not the maximum over ranks of every step"]


def _throughput(record: LaunchRecord) -> Iterable[str] | None:
    if not (record["throughput"] and record["step_time_s"]):
        return None
    expected = samples_per_step(record["cell"]) / median(record["step_time_s"]["slowest"])
    actual = record["throughput"]["global_samples_per_s"]
    messages = (
        [] if isclose(actual, expected, rel_tol=1e-9) else [f"{actual:.6g} samples/s, the step times give {expected:.6g}"]
    )
    samples = samples_per_step(record["cell"]) / record["cell"]["world_size"]
    pairs = zip(record["throughput"]["per_rank_samples_per_s"], record["step_time_s"]["per_rank"], strict=True)
    for rank, (actual, steps) in enumerate(pairs):
        expected = samples / median(steps)
        if not isclose(actual, expected, rel_tol=1e-9):
            messages.append(f"rank {rank}: {actual:.6g} samples/s, its step times give {expected:.6g}")
    return messages


def _utilisation(record: LaunchRecord) -> Iterable[str] | None:
    if record["mfu"] is None:
        return None
    shares = {"MFU": record["mfu"], "HFU": record.get("hfu")}
    return [f"{name} {share:.3f}" for name, share in shares.items() if share is not None and not 0 <= share <= 1]


def formula_flops(towers: Mapping[str, TowerFlops]) -> tuple[int, int]:
    """Return the FLOPs of a step by the formula of the policy: those of the model, and those that are recomputed."""
    model = sum(tower["forward"] + tower["backward"] for tower in towers.values())
    return model, sum(tower["recomputed"] for tower in towers.values())


def _flops_formula(record: LaunchRecord) -> Iterable[str] | None:
    flops = record["flops"]
    towers = flops.get("per_tower") if flops else None
    if not flops or not towers or flops["model_flops_per_step"] is None or is_partly_frozen(record):
        return None  # the formula is of a step that trains the backbone
    model, recomputed = formula_flops(towers)
    counted_recomputed = flops["recomputed_flops_per_step"]
    if counted_recomputed is None:
        return ["recomputed_flops_per_step is null, and the formula says what it should be"]
    comparisons = (
        ("model", flops["model_flops_per_step"], model),
        ("recomputed", counted_recomputed, recomputed),
    )
    return [
        f"{counted:.6g} {kind} FLOPs counted, {formula:.6g} by formula"
        for kind, counted, formula in comparisons
        if not isclose(counted, formula, rel_tol=FLOPS_TOLERANCE)
    ]


INVARIANTS = (
    Invariant("every rank is present", _all_ranks_present),
    Invariant("the world size observed is the one requested", _world_size),
    Invariant("nothing is unknown without a reason", no_unexplained_null),
    Invariant("what is ok was checked against the request", _checked),
    Invariant("reserved >= allocated memory, on every rank", _reserved_covers_allocated),
    Invariant(
        f"phases sum to the step within {PHASE_SUM_TOLERANCE:.0%}, on every rank; on a host that may be busy to no more",
        _phase_sum,
    ),
    Invariant("as many steps as asked for", _step_counts),
    Invariant("samples = batch x accumulation x ranks x steps", _samples),
    Invariant("slowest = maximum over ranks, step by step", _slowest),
    Invariant("throughput follows from the slowest rank's step times", _throughput),
    Invariant("MFU and HFU are between 0 and 1, or null", _utilisation),
    Invariant(f"FLOPs counted are those of the formula within {FLOPS_TOLERANCE:.0%}", _flops_formula),
    *PLAUSIBLE_INVARIANTS,
    *OBSERVED_INVARIANTS,
)
