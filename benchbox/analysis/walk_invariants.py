"""Invariants of walks and of settled pairs: launches do not contradict one another, and the plan says what they show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.certificates import ENDED, certificates
from benchbox.analysis.comparability import throughput_effect, verdict_of_effect
from benchbox.analysis.run_check import Problem, RunCheck
from benchbox.analysis.sequential import criteria_of
from benchbox.analysis.summary import summarize
from benchbox.analysis.walk import walk_point

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import Run, RunStore


class _OfAllLaunches(RunCheck):
    """A check of launches that it keeps, where the run has what it is about: walks, or pairs that are settled."""

    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        self.run = store.run()
        self.applies = self.is_about(self.run)
        self.records: list[LaunchRecord] = []

    def is_about(self, run: Run) -> bool:
        return bool(run.walks)

    def add(self, record: LaunchRecord) -> Iterable[str]:
        if self.applies:
            self.records.append(record)
        return ()


class MonotonicWalks(_OfAllLaunches):
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


class Certificates(_OfAllLaunches):
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


class SettledPairs(_OfAllLaunches):
    """The verdict of a pair that an earlier look settled must be one that the launches of that look can have.

    Holm's correction makes a p larger, by the other pairs of that look: the verdict was by a p between this one and 1. The plan
    may have more pairs since, for all of which an interval is wider: that of one pair is accepted too.
    """

    def is_about(self, run: Run) -> bool:
        return bool((run.sequential or {}).get("settled"))

    def finish(self) -> Iterator[Problem]:
        if not self.applies:
            return
        run, criteria = self.run, criteria_of(self.run)
        summaries = summarize(run, self.records)  # without launches after the look at which a cell stopped
        compared = compare_run(run, summaries, certificates(run, summaries), criteria)
        for pair in {pair.pair_id: pair for pair in (*compared.cells.values(), *compared.walks)}.values():
            verdict, effect = criteria.settled.get(pair.pair_id), pair.effect
            if verdict is None or effect is None or pair.reference is None or pair.is_search:
                continue
            effects = effect, throughput_effect(pair.subject, pair.reference, criteria, pairs=1)
            possible = {verdict_of_effect(effect, p, criteria) for effect in effects for p in (effect.p, 1.0)}
            if verdict not in possible - {"inconclusive"}:
                p = "no p" if effect.p is None else f"p {effect.p:.2g} at an alpha of {criteria.alpha:.2g}"
                shown = f"its launches, up to that look, have a ratio of {effect.ratio:.3f} and {p}"
                yield None, f"run.json: {pair.pair_id} is settled as {verdict}, and {shown}"


def _batch(record: LaunchRecord) -> int:
    return int(record["cell"]["batch"])
