"""Read the reports of a command's processes, and group those that trained together."""

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
    """Report of one process. `job` identifies its process group, as far as the process knows."""

    began: float  # unix time in seconds
    job: str
    facts: RankFacts


@dataclass(frozen=True, slots=True)
class Training:
    """The ranks of one training, in order; if it runs on several machines, the ranks on this one."""

    ranks: tuple[RankFacts, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps that were observed on every rank."""
        return min(len(facts.steps) for facts in self.ranks)

    @property
    def world_size(self) -> int:
        return max(facts.world_size for facts in self.ranks)


def count_finished_ranks(folder: Path) -> int:
    """Return how many ranks a training has on this machine once all have finished their observed steps; 0 until then."""
    finished: dict[tuple[int, int], set[int]] = {}
    for mark in folder.glob("through-*"):
        rank, world_size, local_world_size = map(int, mark.name.split("-")[1:4])
        finished.setdefault((world_size, local_world_size), set()).add(rank)
    # Several launchers of one training on this machine have more ranks together than each of them.
    return max((len(ranks) for (_, local), ranks in finished.items() if len(ranks) >= local), default=0)


def read_trainings(folder: Path) -> list[Training]:
    """Read the reports in a folder: one entry for each training that took a step, in the order of their start."""
    reports = []
    for path in folder.glob("facts-*.json"):
        report = json.loads(path.read_text())
        reports.append(ProcessReport(report["began"], report["job"], RankFacts.from_dict(report["facts"])))
    return group_trainings(reports)


def group_trainings(reports: Iterable[ProcessReport]) -> list[Training]:
    """Group the reports of one job and world size into trainings.

    A rank that reports again begins a new training: the command trained twice, or its launcher restarted it.
    """
    groups: list[list[ProcessReport]] = []
    open_groups: dict[tuple[str, int], list[ProcessReport]] = {}
    for report in sorted(reports, key=lambda report: report.began):
        key = (report.job, report.facts.world_size)
        group = open_groups.get(key)
        if group is None or any(member.facts.rank == report.facts.rank for member in group):
            group = open_groups[key] = []
            groups.append(group)
        group.append(report)
    return [Training(tuple(sorted((report.facts for report in group), key=lambda facts: facts.rank))) for group in groups]


def select_training(trainings: Sequence[Training]) -> Training:
    """Return the training to judge: the latest of those with most steps, because a restart follows a failure."""
    return max(reversed(trainings), key=lambda training: training.steps)


def list_limitations(training: Training, *, trainings: int, steps: int) -> Iterator[str]:
    """Yield notes for the reader if a training was selected among several `trainings`, or was only observed in part."""
    if trainings > 1:
        yield f"the command trained {trainings} times; judged is the last training of those with most steps"
    if len(training.ranks) < training.world_size:
        yield (
            f"{len(training.ranks)} of {training.world_size} ranks were seen; the others ran on another machine, or ended "
            "before their first step"
        )
    if training.steps < steps:
        yield f"{training.steps} of {steps} steps were seen: the command ended before the others"


def explain_unseen_steps(training: Training) -> str | None:
    """Explain why the ranks of a training reported no step; None if they did, or if a loss scaler skipped every one."""
    unseen = [facts for facts in training.ranks if facts.scaler is None or facts.scaler.skipped < facts.scaler.steps]
    reasons = [facts.missing["steps"] for facts in unseen if "steps" in facts.missing]
    return f"no optimizer step was seen: {reasons[0]}" if reasons else None


def explain_no_steps(folder: Path) -> str:
    """Explain why no optimizer step was observed, from the marks that the processes of the command left."""
    for path in sorted(folder.glob("problem-*.json")):
        return f"the observer could not start: {json.loads(path.read_text())['problem']}"
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
