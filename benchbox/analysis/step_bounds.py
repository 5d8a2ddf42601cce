"""Lower bounds of the steps of a run, at the measured peaks and links of its machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchbox.analysis.partial_steps import frozen_backbone, skipped_updates
from benchbox.analysis.quantities import counted
from benchbox.analysis.summary import machine_of
from benchbox.registry.recipes import recipes
from benchbox.store.links import MeasuredLinks, link_backend
from benchbox.store.peaks import MeasuredPeaks, group_of
from benchbox.theory.links import measured_link
from benchbox.theory.prediction import Estimate
from benchbox.theory.step_bound import StepBound, bound_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.predictions import CellPrediction

PeaksOf = Callable[[str], Mapping[str, MeasuredPeaks]]  # by group of ranks, of a machine
LinksOf = Callable[[str], Mapping[str, MeasuredLinks]]  # by backend of torch.distributed, of a machine

NO_MACHINE = "the launches of the run name no machine, or several"
_AGAIN = "`benchbox estimate` of the run predicts it anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """Lower bounds by cell id, and why the other cells have none."""

    by_cell: Mapping[str, StepBound] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """Sentences on what was not measured for the bounds, and on how many cells have none and why."""
        alone = dict.fromkeys(bound.computation_alone for bound in self.by_cell.values() if bound.computation_alone)
        sentences = [f"The step time of several ranks is that of computation alone: {reason}." for reason in alone]
        if self.reasons:
            counts = Counter(self.reasons.values()).most_common()
            texts = (f"{counted(count, 'cell')} ({reason})" for reason, count in counts)
            sentences.append(f"Without a lower bound of the step time: {'; '.join(texts)}.")
        return " ".join(sentences)


NO_BOUNDS = StepBounds()


def step_bounds(
    predictions: Mapping[str, CellPrediction],
    summaries: Sequence[CellSummary],
    *,
    peaks: PeaksOf | None,
    links: LinksOf | None,
) -> StepBounds:
    """Return the bounds of the cells of a run, and why there is none for others; nothing for a run without predictions.

    Batches that do not fit have no step to bound.
    """
    machine = machine_of(summaries)
    measured_peaks = {} if peaks is None or machine is None else peaks(machine)
    measured_links = {} if links is None or machine is None else links(machine)
    by_cell: dict[str, StepBound] = {}
    reasons: dict[str, str] = {}
    for summary in (summary for summary in summaries if predictions and not summary.beyond_memory):
        prediction = predictions.get(summary.cell_id)
        if prediction is None and not summary.records:
            continue
        if prediction is None:
            bound: StepBound | str = "not predicted"
        elif reason := _unbounded(summary, prediction):
            bound = reason
        elif machine is None:
            bound = NO_MACHINE
        else:
            bound = _bound(summary, prediction, measured_peaks, measured_links)
        if isinstance(bound, str):
            reasons[summary.cell_id] = bound
        else:
            by_cell[summary.cell_id] = bound
    return StepBounds(by_cell=by_cell, reasons=reasons)


def _unbounded(summary: CellSummary, prediction: CellPrediction) -> str | None:
    """Return why the prediction of a cell bounds its measured steps on no machine; None where it does."""
    if not summary.ok:
        return "no launch ended ok"
    if (recipe := summary.cell["recipe"]) not in recipes():
        return f"recipe {recipe} is not known here"
    if prediction["world_size"] > 1 and "collectives_by_ranks" not in prediction:
        return f"predictions of an older benchbox do not say among how many ranks collectives run: {_AGAIN}"
    if "smallest_step_flops" not in prediction:
        return f"predictions of an older benchbox do not say what the smallest step takes: {_AGAIN}"
    return next((reason for record in summary.ok if (reason := _smaller_steps(record))), None)


def _smaller_steps(record: LaunchRecord) -> str | None:
    """Return why measured steps of a launch may do less than the smallest step that is predicted; None where none does."""
    if (padding := record["cell"].get("padding", "full")) != "full":  # older records have none
        return f"steps differ in size under padding: {padding}, and the predicted one is not the smallest"
    return skipped_updates(record) or frozen_backbone(record)


def _bound(
    summary: CellSummary,
    prediction: CellPrediction,
    measured_peaks: Mapping[str, MeasuredPeaks],
    measured_links: Mapping[str, MeasuredLinks],
) -> StepBound | str:
    """Return the bound of a cell that was measured, or what was not recorded or measured for it."""
    group, ranks = group_of(summary.ok[-1]), prediction["world_size"]
    if group is None:
        return "device or threads were not recorded"
    if (peaks := measured_peaks.get(group)) is None:
        return (
            f"the peaks of {group} were not measured: on the machine of the run, benchbox doctor --peaks --ranks {ranks} "
            f"measures them{', and --links the links' if ranks > 1 else ''}"
        )
    torch = (summary.ok[-1]["environment"] or {}).get("torch")
    if torch is not None and torch != peaks.torch:
        return f"the peaks of {group} are those of torch {peaks.torch}, and the run of torch {torch}: benchbox doctor --peaks"
    backend = link_backend(peaks.device)
    link = measured_link(backend, measured_links[backend]) if backend in measured_links else None
    return bound_step(Estimate.from_dict(prediction), recipes()[summary.cell["recipe"]].compute, peaks, link)
