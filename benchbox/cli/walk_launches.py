"""`batch: {search: max}`: rounds of launches, the next batch of every walk in each of them, until all walks have ended."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.analysis.certificates import ENDED, certificates, pruning_reason
from benchbox.analysis.quantities import counted
from benchbox.analysis.summary import summarize
from benchbox.analysis.walk import bounds_from, needs_no_less, walk_point, walk_state
from benchbox.errors import ConfigurationError, Problem, RecordError
from benchbox.launch.resume import pending_launches
from benchbox.plan import rounds
from benchbox.spec.cell import Cell

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.analysis.walk import WalkState
    from benchbox.launch.resume import Launches
    from benchbox.launch.runner import RunSummary
    from benchbox.registry.launch_record import CellDict
    from benchbox.spec import Matrix
    from benchbox.spec.cell import MeasureSpec
    from benchbox.spec.matrix import BatchSearch
    from benchbox.store.run import Run, RunStore, Walk


def check_memory_limit(matrix: "Matrix", overrides: Mapping[str, str]) -> None:
    """Check that something limits the memory of the ranks on this machine.

    Raises:
        ConfigurationError: with the position of the search.
    """
    from benchbox.launch.process.environment import has_cuda_device
    from benchbox.spec.overrides import apply_overrides
    from benchbox.spec.source import read_source

    if matrix.search is None or matrix.measure.memory_limit is not None or has_cuda_device(os.environ):
        return
    source = read_source(matrix.path)
    apply_overrides(source, overrides)
    message = "without a GPU a search needs measure.memory_limit: nothing else ends it"
    raise ConfigurationError(Problem(source.where(("axes", "batch")), message, "give it as in 64 MiB"))


def plan_walks(
    run: "Run",
    starts: Sequence["Cell"],
    search: "BatchSearch",
    earlier: "Run | None",
    anew: "Collection[Cell]" = (),
) -> "Run":
    """Return a plan with a walk for each cell that begins one, and the batches that an earlier plan has tried there.

    Args:
        anew: first cells of the walks that begin again, without earlier batches and prediction.
    """
    if earlier and earlier.measure.get("memory_limit") != run.measure["memory_limit"]:
        earlier = None
    tried = [earlier.cells[cell_id] for walk in earlier.walks for cell_id in walk["cells"]] if earlier else []
    predictions = {walk_point(earlier.cells[walk["cells"][0]]): walk for walk in earlier.walks} if earlier else {}
    walks: list[Walk] = []
    cells = dict(run.cells)
    for start in starts:
        point = walk_point(start.to_dict())
        goes_on = start not in anew
        batches = {Cell.from_dict(dict(cell)).cell_id: cell for cell in tried if goes_on and walk_point(cell) == point}
        batches = {start.cell_id: start.to_dict()} | batches
        cells |= batches
        before = predictions.get(point) if goes_on else None
        if before and before["at_most"] != search.at_most:  # it was predicted up to that
            before = None
        walks.append(
            {
                "cells": list(batches),
                "at_most": search.at_most,
                "predicted_batch": before["predicted_batch"] if before else None,
                "prediction_reason": before["prediction_reason"] if before else None,
                "fastest": None,
            }
        )
    return replace(run, walks=walks, cells=_in_order(cells, walks))


def _in_order(cells: "Mapping[str, CellDict]", walks: "Sequence[Walk]") -> "dict[str, CellDict]":
    """Return the cells walk by walk, the smallest batch first, then those that are in no walk."""
    by_walk = [cell_id for walk in walks for cell_id in sorted(walk["cells"], key=lambda cell_id: cells[cell_id]["batch"])]
    return {cell_id: cells[cell_id] for cell_id in dict.fromkeys([*by_walk, *cells])}


def find_records(store: "RunStore", cells: Sequence["Cell"], starts: Sequence["Cell"]) -> list[tuple[str, int]]:
    """Return the records, as (id of the cell, launch), of cells and of all batches of walks, whatever plan they are of.

    Args:
        starts: first cells of the walks.
    """
    cell_ids = {cell.cell_id for cell in cells}
    points = {walk_point(start.to_dict()) for start in starts}
    return [
        (cell_id, launch)
        for cell_id, launch in store.stored_launches()
        if cell_id in cell_ids or (points and _is_of_walk(store, cell_id, launch, points))
    ]


def _is_of_walk(store: "RunStore", cell_id: str, launch: int, points: "Collection[object]") -> bool:
    try:
        record = store.record(cell_id, launch)
    except RecordError:  # who plans its cell is told so
        return False
    return record is not None and walk_point(record["cell"]) in points


@dataclass(slots=True)
class WalkLaunches:
    """The walks of a run. `run` is its plan, which gets a cell for every batch that is tried.

    Nothing but the plan and the records decides which batch is next, so the same command continues after any end.
    """

    run: "Run"
    store: "RunStore"
    selected: Sequence["Cell"]  # that begin the walks to go on with
    measure: "MeasureSpec"
    policy_dirs: Sequence[Path]
    fresh: bool = False
    _attempted: set[str] = field(default_factory=set)  # ids of the cells launched by this object
    _fixed: set[str] = field(init=False)  # ids of the cells that are in no walk

    def __post_init__(self) -> None:
        self._fixed = set(self.run.cells) - self.run.cells_of_walks

    def predict(self, console: "Console") -> None:
        """Predict the largest batch of every selected walk that has not ended and has no prediction.

        That of a walk with outdated launches is made anew: it was of other sources.
        """
        valid = self._statuses()
        for walk in self._selected_walks():
            if any(cell_id not in valid and self._status(cell_id) is not None for cell_id in walk["cells"]):
                walk["predicted_batch"] = walk["prediction_reason"] = None
        missing = [walk for walk, state in self._states() if state.batch is not None and walk["predicted_batch"] is None]
        if not missing:
            return
        from benchbox.cli.predicting import predict_largest_batches, rank_limit_bytes

        console.print(f"predicting the largest batch of {len(missing)} walks")
        starts = [self._cell(walk["cells"][0]) for walk in missing]
        measure = self.measure
        predictions = predict_largest_batches(
            starts, self.policy_dirs, measure.probed_step, rank_limit_bytes(measure.memory_limit), missing[0]["at_most"]
        )
        for walk in missing:
            prediction = predictions[walk["cells"][0]]
            walk["predicted_batch"] = prediction if isinstance(prediction, int) else None
            walk["prediction_reason"] = prediction if isinstance(prediction, str) else None

    def pending(self) -> "Launches":
        """Return the next launches: the next batch of every walk, or else the missing launches of the fastest batches."""
        return self._probes() or self._missing_repeats()

    def done(self) -> int:
        """Return the number of launches of the walks that need not be repeated."""
        done = len(self._statuses())
        if done and not self._probes():
            done += len(self._repeats()) - len(self._missing_repeats())
        return done

    def launch(self, launch: "Callable[[Launches], RunSummary]", console: "Console") -> "RunSummary":
        """Launch rounds until all walks have ended, then the further launches of the fastest batch of each.

        Args:
            launch: runs launches, and stores their records.
        """
        from benchbox.launch.runner import RunSummary

        self._drop_outdated()
        summary, number = RunSummary(), 0
        while not summary.has_ended and (probes := self._probes()):
            number += 1
            console.print(f"round {number}: the next batch of {counted(len(probes), 'walk')}")
            self._add_cells([cell for cell, _ in probes])
            summary = summary.followed_by(launch(probes))
            self._attempted |= {cell.cell_id for cell, _ in probes}
        if not summary.has_ended:
            self._remove_outdated_starts()
            self._skip_pruned()
            repeats = self._repeats()
            self.store.write_run(self.run)
            if repeats:
                console.print("the fastest batch of each walk again")
                summary = summary.followed_by(launch(repeats))
        walked = self.run.cells_of_walks
        summary.failed_cells -= {cell_id for cell_id in summary.failed_cells & walked if self._status(cell_id) == "oom"}
        if not summary.has_ended:
            summary.failed_cells |= self.without_fit()
        return summary

    def without_fit(self) -> set[str]:
        """Return the ids of the first cells of the selected walks of which no batch fits."""
        return {walk["cells"][0] for walk, state in self._states() if state.outcome == "nothing fits"}

    def fastest_batches(self) -> list[str]:
        """Return the ids of the fastest batches of the selected walks that have ended."""
        return [walk["fastest"] for walk in self._selected_walks() if walk["fastest"]]

    def _cell(self, cell_id: str) -> "Cell":
        return Cell.from_dict(dict(self.run.cells[cell_id]))

    def _status(self, cell_id: str) -> str | None:
        """Return how the launch of a cell that searched ended."""
        record = self.store.record(cell_id, 1)
        return None if record is None else record["status"]

    def _statuses(self) -> dict[str, str]:
        """Return how launches ended, by cell: those that need not be repeated, and those of this object."""
        selected = {cell_id for walk in self._selected_walks() for cell_id in walk["cells"]}
        others = self.run.cells_of_walks - selected
        valid = set(self._attempted)
        for cells, fresh in ((selected, self.fresh), (others, False)):
            launches = [(self._cell(cell_id), 1) for cell_id in cells]
            pending = pending_launches(
                launches, self.measure, self.store, self.policy_dirs, fresh=fresh, final=("ok", "oom")
            ).launches
            valid |= cells - {cell.cell_id for cell, _ in pending}
        return {cell_id: status for cell_id in valid if (status := self._status(cell_id)) is not None}

    def _selected_walks(self) -> "list[Walk]":
        chosen = {walk_point(cell.to_dict()) for cell in self.selected}
        return [walk for walk in self.run.walks if walk_point(self.run.cells[walk["cells"][0]]) in chosen]

    def _states(self) -> "list[tuple[Walk, WalkState]]":
        """Return the walks that are selected, with their states."""
        statuses = self._statuses()
        shown = [(self.run.cells[cell_id], status) for cell_id, status in statuses.items()]
        states = []
        for walk in self._selected_walks():
            first = self.run.cells[walk["cells"][0]]
            batches = {self.run.cells[cell_id]["batch"]: statuses[cell_id] for cell_id in walk["cells"] if cell_id in statuses}
            state = walk_state(
                batches,
                start=first["batch"],
                at_most=walk["at_most"],
                predicted=walk["predicted_batch"],
                bounds=bounds_from(first, shown),
            )
            states.append((walk, state))
        return states

    def _probes(self) -> "Launches":
        """Return the next batch of every walk. A walk waits until something fits where less is needed: it may be pruned."""
        states = [(self._cell(walk["cells"][0]), state) for walk, state in self._states() if state.batch is not None]
        nothing_fits_yet = [cell.to_dict() for cell, state in states if state.largest is None]
        return [
            (replace(cell, batch=state.batch), 1)
            for cell, state in states
            if state.batch is not None and not any(needs_no_less(cell.to_dict(), other) for other in nothing_fits_yet)
        ]

    def _drop_outdated(self) -> None:
        """Take batches of selected walks out of the plan that will not be launched again unless the walk comes to them."""
        valid = self._statuses()
        for walk in self._selected_walks():
            walk["cells"] = [cell_id for cell_id in walk["cells"] if cell_id in valid or cell_id == walk["cells"][0]]
        dropped = set(self.run.cells) - self.run.cells_of_walks - self._fixed
        self.run = replace(self.run, cells={key: cell for key, cell in self.run.cells.items() if key not in dropped})

    def _add_cells(self, cells: "Sequence[Cell]") -> None:
        """Add batches to the plan and write it. Further launches of them are of an earlier search, and no longer valid."""
        by_point = {walk_point(self.run.cells[walk["cells"][0]]): walk for walk in self.run.walks}
        added = dict(self.run.cells)
        for cell in cells:
            walk = by_point[walk_point(cell.to_dict())]
            walk["cells"] = list(dict.fromkeys([*walk["cells"], cell.cell_id]))
            added[cell.cell_id] = cell.to_dict()
        self.run = replace(self.run, cells=_in_order(added, self.run.walks))
        self.store.write_run(self.run)
        searched = {cell.cell_id for cell in cells}
        for cell_id, launch in self.store.stored_launches():
            if cell_id in searched and launch > 1:
                self.store.remove_record(cell_id, launch)

    def _remove_outdated_starts(self) -> None:
        """Remove outdated records of first batches that other walks made superfluous: the walks would be judged by them."""
        valid = self._statuses()
        for walk in self._selected_walks():
            if (start := walk["cells"][0]) not in valid:
                for cell_id, launch in self.store.stored_launches():
                    if cell_id == start:
                        self.store.remove_record(cell_id, launch)

    def _skip_pruned(self) -> None:
        """Move walks without any launch, because none of their batches can fit, to the skipped cells of the plan."""
        shown = [(self.run.cells[cell_id], status) for cell_id, status in self._statuses().items()]
        pruned = [walk["cells"][0] for walk, state in self._states() if state.outcome == "pruned" and len(walk["cells"]) == 1]
        skipped = [
            {"cell": self.run.cells[cell_id], "reason": pruning_reason(bounds_from(self.run.cells[cell_id], shown))}
            for cell_id in pruned
            if self._status(cell_id) is None
        ]
        if not skipped:
            return
        walks = [walk for walk in self.run.walks if walk["cells"][0] not in pruned]
        cells = {cell_id: cell for cell_id, cell in self.run.cells.items() if cell_id not in pruned}
        self.run = replace(self.run, walks=walks, cells=cells, skipped=[*self.run.skipped, *skipped])
        self.store.write_run(self.run)

    def _repeats(self) -> "Launches":
        """Name the fastest batch of every walk that has ended in the plan, and return its further launches that are planned."""
        results = certificates(self.run, summarize(self.run, self.store.records()))
        for walk, result in zip(self.run.walks, results, strict=True):
            walk["fastest"] = result.fastest.cell_id if result.search in ENDED and result.fastest else None
        cells = [self._cell(cell_id) for cell_id in self.fastest_batches()]
        planned = self.run.planned_launches()
        most = max((planned[cell.cell_id] for cell in cells), default=1)
        return [(cell, number) for cell, number in rounds(cells, range(2, most + 1)) if number <= planned[cell.cell_id]]

    def _missing_repeats(self) -> "Launches":
        if not self._statuses():
            return []
        return pending_launches(self._repeats(), self.measure, self.store, self.policy_dirs, fresh=self.fresh).launches
