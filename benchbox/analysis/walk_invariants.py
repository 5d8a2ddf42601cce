"""Invariants of walks: what launches show of the largest batch does not contradict itself, and the plan says what they show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.certificates import ENDED, certificates
from benchbox.analysis.run_check import Problem, RunCheck
from benchbox.analysis.summary import summarize
from benchbox.analysis.walk import walk_point

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import RunStore


class _OfWalks(RunCheck):
    """A check of the launches of walks, which are few: it keeps them."""

    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self.run = store.run()
        self.applies = bool(self.run.walks)
        self.records: list[LaunchRecord] = []

    def add(self, record: LaunchRecord) -> Iterable[str]:
        if self.applies:
            self.records.append(record)
        return ()


class MonotonicWalks(_OfWalks):
    """No launch that searched may fit at a batch above one that ran out of memory. Those that repeat a batch decide nothing."""

    def finish(self) -> Iterator[Problem]:
        for walk in self.run.walks:
            of_walk = [record for record in self.records if record["cell_id"] in walk["cells"] and record["launch"] == 1]
            failed = [record for record in of_walk if record["status"] == "oom"]
            smallest = min(failed, key=_batch, default=None)
            for record in of_walk:
                if smallest is not None and record["status"] == "ok" and _batch(record) >= _batch(smallest):
                    message = f"batch {_batch(record)} fits, and batch {_batch(smallest)} ran out of memory"
                    where = f"in launch {smallest['launch']} of {smallest['cell_id']}"
                    yield (record["cell_id"], record["launch"]), f"{message} {where}"


class Certificates(_OfWalks):
    """The plan must say of a walk what its launches show, and the search of one that has ended must have ended by them."""

    def finish(self) -> Iterator[Problem]:
        if not self.applies:
            return
        run = self.run
        results = certificates(run, summarize(run, self.records))
        for walk, result in zip(run.walks, results, strict=True):
            first, *others = walk["cells"]
            point = walk_point(run.cells[first])
            for cell_id in others:
                if walk_point(run.cells[cell_id]) != point:
                    yield None, f"run.json: {cell_id} differs from {first} of its walk in more than the batch"
            if walk["fastest"] is None:
                continue
            if result.search not in ENDED:
                yield None, f"the walk of {first} ended, and its launches do not show it: {result.reason}"
            fastest = result.fastest.cell_id if result.fastest else None
            if fastest != walk["fastest"]:
                yield (
                    None,
                    f"run.json: the fastest batch of the walk of {first} is {walk['fastest']}, by its launches {fastest}",
                )


def _batch(record: LaunchRecord) -> int:
    return int(record["cell"]["batch"])
