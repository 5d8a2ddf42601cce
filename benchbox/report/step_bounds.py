"""Lower bounds of the steps of a run, at the measured peaks and links of its machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchbox.analysis.summary import machine_of
from benchbox.registry.launch_record import device_type
from benchbox.registry.recipes import recipes
from benchbox.store.links import MeasuredLinks, link_backend
from benchbox.store.peaks import MeasuredPeaks, group_name
from benchbox.theory.links import measured_link
from benchbox.theory.prediction import Estimate
from benchbox.theory.step_bound import StepBound, bound_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.store.predictions import CellPrediction

PeaksOf = Callable[[str], Mapping[str, MeasuredPeaks]]  # by group of ranks, of a machine
LinksOf = Callable[[str], Mapping[str, MeasuredLinks]]  # by backend of torch.distributed, of a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """Lower bounds by cell id, and sentences on what was not measured for them."""

    by_cell: Mapping[str, StepBound] = field(default_factory=dict)
    note: str = ""


def step_bounds(
    predictions: Mapping[str, CellPrediction],
    summaries: Sequence[CellSummary],
    *,
    peaks: PeaksOf | None,
    links: LinksOf | None,
) -> StepBounds:
    """Return the bounds of the cells that were measured and have predictions, of a run on one machine."""
    machine = machine_of(summaries)
    if machine is None:
        return StepBounds()
    peaks_by_group = {} if peaks is None else peaks(machine)
    links_by_backend = {} if links is None else links(machine)
    by_cell: dict[str, StepBound] = {}
    without_peaks: dict[str, int] = {}  # group -> its ranks
    lacks_links = False
    for summary in summaries:
        prediction, recipe = predictions.get(summary.cell_id), recipes().get(summary.cell["recipe"])
        if prediction is None or recipe is None or not summary.ok:
            continue
        ranks = prediction["world_size"]
        record = summary.ok[-1]
        observed, threads = record["observed"], (record["environment"] or {}).get("threads")
        if observed is None or threads is None or (ranks > 1 and "collectives_by_ranks" not in prediction):
            continue
        device = device_type(observed["device"][0])
        group = group_name(device, ranks, threads)
        if group not in peaks_by_group:
            without_peaks[group] = ranks
            continue
        backend = link_backend(device)
        link = measured_link(backend, links_by_backend[backend]) if backend in links_by_backend else None
        bound = bound_step(Estimate.from_dict(prediction), recipe.compute, peaks_by_group[group], link)
        if bound is not None:
            by_cell[summary.cell_id] = bound
            lacks_links = lacks_links or (ranks > 1 and link is None)
    return StepBounds(by_cell=by_cell, note=_note(without_peaks, lacks_links=lacks_links))


def _note(without_peaks: Mapping[str, int], *, lacks_links: bool) -> str:
    sentences = []
    if without_peaks:
        counts = set(without_peaks.values())
        ranks, links = counts.pop() if len(counts) == 1 else "N", max(without_peaks.values()) > 1
        groups = ", ".join(sorted(without_peaks))
        sentences.append(
            f"Step times are not predicted without measured peaks, here of {groups}: on the machine of the run, benchbox "
            f"doctor --peaks --ranks {ranks} measures them{', and --links the links' if links else ''}."
        )
    if lacks_links:
        sentences.append(
            "The step time of several ranks is that of computation alone: benchbox doctor --links measures their links."
        )
    return " ".join(sentences)
