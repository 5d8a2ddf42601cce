"""Predictions beside measurements: the error, a verdict, and what the difference consists of."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from benchbox.analysis.partial_steps import frozen_backbone
from benchbox.analysis.quantities import quantity, significant
from benchbox.analysis.stragglers import mean_split

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import CollectiveRecord, LaunchRecord
    from benchbox.store.predictions import CellPrediction, TrafficPrediction
    from benchbox.theory.step_bound import StepBound

PEAK_MEMORY, COMMUNICATION, STEP_TIME = "peak memory", "communication", "step time"
MEMORY_TOLERANCE = 0.05  # of the measured peak; communication is predicted exactly

_NO_ORDER = (
    "DeepSpeed had no valid record of the order of modules, as in the first two steps and where steps call different ones, and "
    "fetched them one by one"
)
_OTHER_SIZES = "under padding: longest steps and ranks differ in size, and the prediction need not be for the size of this peak"
_MAY_BE_SKIPPED = "optim.spike may have skipped the compared step, and one that is taken is predicted"
_SMALL_TENSORS_BYTES = 16 * 2**10  # losses, norms and step counts of a step take less

_NAMED_SHARE = 0.05  # of a step, from which on a residual names a part of it
_PART_TEXTS = {
    "data_wait": "waiting for data",
    "compute": "own work",
    "core_wait": "waiting for a core",
    "rank_wait": "waiting for other ranks",
    "transfer": "transfers",
}

PredictionVerdict = Literal["confirmed", "refuted", "incomparable", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """One predicted quantity of a cell. `error` is predicted over measured, minus 1; `residual` names the difference."""

    quantity: str
    predicted: float
    measured: float | None
    verdict: PredictionVerdict
    residual: str
    unit: Literal["bytes", "s"] = "bytes"

    @property
    def error(self) -> float | None:
        if self.measured is None:
            return None
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else None
        return self.predicted / self.measured - 1


def reconcile(prediction: CellPrediction, summary: CellSummary, bound: StepBound | None = None) -> tuple[Reconciliation, ...]:
    """Return the predicted memory, communication and, with a bound, step time of a cell beside what its launches measured."""
    record = next(iter(reversed(summary.ok)), None)
    entries = (_memory(prediction, summary, record), _communication(prediction, record))
    return entries if bound is None else (*entries, _step_time(prediction, summary, record, bound))


def _memory(prediction: CellPrediction, summary: CellSummary, record: LaunchRecord | None) -> Reconciliation:
    spread, predicted = summary.values["peak_allocated_bytes"], prediction["peak_bytes"]
    if record is None or spread is None or record["memory"] is None:
        return _unmeasured(PEAK_MEMORY, predicted)
    measured = round(spread.value)
    if other := _other_policy(prediction, record):
        return Reconciliation(
            quantity=PEAK_MEMORY, predicted=predicted, measured=measured, verdict="incomparable", residual=other
        )
    is_close = abs(predicted - measured) <= MEMORY_TOLERANCE * measured
    source = record["memory"]["source"]
    other_step = _other_step(prediction, record, source)
    residual = _memory_residual(prediction, measured, source=source, is_close=is_close, other_step=other_step)
    if not is_close and _lacks_order(prediction, record):
        residual += f"; {_NO_ORDER}"
    reserved = record["memory"]["worst"]["reserved_peak_bytes"]
    if reserved is not None:
        gap = reserved - (record["memory"]["worst"]["allocated_peak_bytes"] or 0)
        residual += f"; the allocator reserves {quantity(gap, 'bytes')} more than it gives out"
    return Reconciliation(
        quantity=PEAK_MEMORY,
        predicted=predicted,
        measured=measured,
        verdict="confirmed" if is_close else "incomparable" if other_step else "refuted",
        residual=residual,
    )


def _other_step(prediction: CellPrediction, record: LaunchRecord, source: str) -> str | None:
    """Return why the step of a measured peak may be unlike the predicted one; None where it is the same."""
    if _may_be_skipped(record):
        return _MAY_BE_SKIPPED
    if source == "torch.cuda" and (frozen := frozen_backbone(record)):
        return frozen
    # Tensors are counted in the step that is predicted, an allocator's peak is that of all measured steps.
    has_size = source == "tensor_storage" and prediction.get("has_size_of_step", False)
    return None if has_size or record["cell"].get("padding", "full") == "full" else _OTHER_SIZES


def _may_be_skipped(record: LaunchRecord) -> bool:
    """Return whether `optim.spike` skips steps: whether it skipped the one that was probed is not recorded."""
    spike = record["cell"]["optim"].get("spike")  # older records have none
    return spike is not None and spike["action"] == "skip"


def _memory_residual(prediction: CellPrediction, measured: int, *, source: str, is_close: bool, other_step: str | None) -> str:
    difference = measured - prediction["peak_bytes"]
    direction = "more" if difference >= 0 else "less"
    amount = f"{quantity(abs(difference), 'bytes')} {direction}"
    if not is_close:
        largest = max(prediction["components"], key=lambda name: prediction["components"][name])
        reason = other_step or "no formula has it"
        return f"{amount} than predicted for {prediction['moment']}, when most is {largest}; {reason}"
    if source == "torch.cuda":
        return f"{amount}: the allocator's rounding, and workspaces of libraries"
    if abs(difference) > _SMALL_TENSORS_BYTES:
        return f"{amount} than predicted for {prediction['moment']}: no formula has it"
    return f"{amount}: small tensors, such as losses, norms and step counts"


def _communication(prediction: CellPrediction, record: LaunchRecord | None) -> Reconciliation:
    predicted = sum(entry["bytes"] for entry in prediction["collectives"].values())
    if record is None or record["collectives"] is None:
        return _unmeasured(COMMUNICATION, predicted)
    measured = sum(entry["bytes"] for entry in record["collectives"].values())
    other = _other_policy(prediction, record)
    differences = list(_differences(prediction["collectives"], record["collectives"]))
    if _lacks_order(prediction, record):
        differences.append(_NO_ORDER)
    is_other_step = bool(differences) and _may_be_skipped(record)
    if is_other_step:
        differences.append(_MAY_BE_SKIPPED)
    return Reconciliation(
        quantity=COMMUNICATION,
        predicted=predicted,
        measured=measured,
        verdict="incomparable" if other or is_other_step else "refuted" if differences else "confirmed",
        residual=other or "; ".join(differences) or "none: calls and bytes are equal",
    )


def _step_time(
    prediction: CellPrediction, summary: CellSummary, record: LaunchRecord | None, bound: StepBound
) -> Reconciliation:
    """Return the measured step beside its lower bound, which is refuted by a step that is shorter."""
    spread = summary.values["step_time_s"]
    if record is None or spread is None:
        return _unmeasured(STEP_TIME, bound.seconds, unit="s")
    other = _other_policy(prediction, record)
    is_bound = bound.seconds <= spread.value * (1 + bound.uncertainty)
    return Reconciliation(
        quantity=STEP_TIME,
        predicted=bound.seconds,
        measured=spread.value,
        verdict="incomparable" if other else "confirmed" if is_bound else "refuted",
        residual=other or _step_residual(summary, spread.value, bound, is_bound=is_bound),
        unit="s",
    )


def _step_residual(summary: CellSummary, measured_s: float, bound: StepBound, *, is_bound: bool) -> str:
    ratio = f"{significant(measured_s / bound.seconds, 2)} times the bound of {bound.limit}"
    if not is_bound:
        rates = "peaks" if bound.limit == "computation" else "links"
        return f"{ratio}: the measured {rates} are too low, or a step does less than predicted"
    # Ranks end a step together, so that the parts of a mean rank add up to it. Where parts are unknown, phases are not.
    parts = {_PART_TEXTS[part]: fmean(seconds) for part, seconds in mean_split(summary).items()}
    parts = parts or {phase.replace("_", " "): seconds for phase, seconds in summary.phases.items()}
    shares = sorted(((seconds / sum(parts.values()), part) for part, seconds in parts.items()), reverse=True)
    named = [(share, part) for share, part in shares if share >= _NAMED_SHARE]
    texts = [f"{share:.0%} {'' if number else 'of the step is '}{part}" for number, (share, part) in enumerate(named)]
    return f"{ratio}: {', '.join(texts)}" if texts else ratio


def _lacks_order(prediction: CellPrediction, record: LaunchRecord) -> bool:
    """Return whether ZeRO-3 had no valid order of modules in the step that was observed.

    At the end of such a step the ranks compare what they have recorded by broadcasts, which no other step has
    (`PartitionedParameterCoordinator.reset_step`).
    """
    measured = record["collectives"] or {}
    return record["cell"]["backend"] == "zero3" and "broadcast" in measured.keys() - prediction["collectives"].keys()


def _differences(predicted: Mapping[str, TrafficPrediction], measured: Mapping[str, CollectiveRecord]) -> Iterator[str]:
    for name in sorted({*predicted, *measured}):
        expected, found = predicted.get(name), measured.get(name)
        calls = (expected["count"] if expected else 0, found["count"] if found else 0)
        sizes = (expected["bytes"] if expected else 0, found["bytes"] if found else 0)
        if calls[0] != calls[1]:
            yield f"{name}: {calls[0]} calls predicted, {calls[1]} measured"
        if sizes[0] != sizes[1]:
            yield f"{name}: {sizes[0]:,} bytes predicted, {sizes[1]:,} measured"


def _other_policy(prediction: CellPrediction, record: LaunchRecord) -> str | None:
    """Return why a prediction is not about the policy that was measured: a record may be older than the policy's code."""
    observed = record["observed"]
    if observed is None or observed["total_numel"] == prediction["total_numel"]:
        return None
    counts = f"{observed['total_numel']:,} parameters, and it has {prediction['total_numel']:,} now"
    return f"the policy that was measured had {counts}"


def _unmeasured(name: str, predicted: float, unit: Literal["bytes", "s"] = "bytes") -> Reconciliation:
    residual = "no launch ended ok with it"
    return Reconciliation(
        quantity=name, predicted=predicted, measured=None, verdict="not measured", residual=residual, unit=unit
    )
