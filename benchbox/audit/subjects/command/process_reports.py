"""Reading what the processes of a command saw, and telling which of them trained together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.observer.facts import RankFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What one process saw. `job` is what it knew about the group it belongs to."""

    began: float  # unix time in seconds
    job: str
    facts: RankFacts


@dataclass(frozen=True, slots=True)
class Training:
    """The ranks of one training, in order; of several machines, those on this one."""

    ranks: tuple[RankFacts, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank has seen."""
        return min(len(facts.steps) for facts in self.ranks)

    @property
    def world_size(self) -> int:
        return max(facts.world_size for facts in self.ranks)


def count_finished_ranks(folder: Path) -> int:
    """The ranks of a training whose every rank has been through its steps, or 0 as long as there is none."""
    found: dict[int, set[int]] = {}
    for mark in folder.glob("through-*"):
        rank, ranks = map(int, mark.name.split("-")[1:3])
        found.setdefault(ranks, set()).add(rank)
    return max((ranks for ranks, there in found.items() if len(there) == ranks), default=0)


def read_trainings(folder: Path) -> list[Training]:
    """What was seen in the folder, one entry for each training that took a step, in the order in which they began."""
    sightings = []
    for path in folder.glob("facts-*.json"):
        told = json.loads(path.read_text())
        sightings.append(ProcessReport(told["began"], told["job"], RankFacts.from_dict(told["facts"])))
    return group_trainings(sightings)


def group_trainings(sightings: Iterable[ProcessReport]) -> list[Training]:
    """Ranks that belong together: of one job and world size, and no rank twice. A rank that comes again begins a new training:
    the command trained twice, or was restarted by its launcher.
    """
    groups: list[list[ProcessReport]] = []
    open_groups: dict[tuple[str, int], list[ProcessReport]] = {}
    for sighting in sorted(sightings, key=lambda each: each.began):
        key = (sighting.job, sighting.facts.world_size)
        group = open_groups.get(key)
        if group is None or any(each.facts.rank == sighting.facts.rank for each in group):
            group = open_groups[key] = []
            groups.append(group)
        group.append(sighting)
    return [Training(tuple(sorted((each.facts for each in group), key=lambda facts: facts.rank))) for group in groups]


def select_training(found: Sequence[Training]) -> Training:
    """The one to be judged: of those with most steps the last, as a restart comes after what failed."""
    return max(reversed(found), key=lambda training: training.steps)


def list_limitations(training: Training, *, of: int, steps: int) -> Iterator[str]:
    """What a reader must know of the training that was chosen: it is one `of` several, or less than all of it was seen."""
    if of > 1:
        yield f"the command trained {of} times; judged is the last of those with most steps"
    if len(training.ranks) < training.world_size:
        yield (
            f"{len(training.ranks)} of {training.world_size} ranks were seen; the others ran on another machine, or ended "
            "before their first step"
        )
    if training.steps < steps:
        yield f"{training.steps} of {steps} steps were seen: the command ended before the others"


def explain_no_steps(folder: Path) -> str:
    """Why no optimizer step was seen, as far as the processes of the command got."""
    for path in sorted(folder.glob("problem-*.json")):
        return f"the witness could not begin: {json.loads(path.read_text())['problem']}"
    if (folder / "torch").exists():
        return (
            "torch was imported, and no torch.optim.Optimizer took a step: the command ended before its first step, or steps "
            "with something else"
        )
    if (folder / "python").exists():
        return "no Python that the command started imported torch"
    return (
        "no Python of the command could be looked into: it runs in a container or on another machine, with an environment of "
        "its own, or with -I, -E or -S"
    )
