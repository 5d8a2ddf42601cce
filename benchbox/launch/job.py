"""A job for a group of ranks, the files it leaves, and what a launcher must offer to run it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from benchbox.store.files import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a group of ranks is to do. Everything it leaves is in `folder`, which belongs to it alone."""

    kind: str  # which of the worker's jobs
    ranks: int
    told: Mapping[str, Any]  # what the worker is told about it, in plain JSON values
    folder: Path
    timeout_s: float | None  # start to end; None: it may take as long as it takes
    hang_after_s: float  # without any rank making progress

    @property
    def file(self) -> Path:
        """What the worker reads."""
        return self.folder / "job.json"

    @property
    def group_log(self) -> Path:
        """What the process that starts the ranks says, and the ranks before they have logs of their own."""
        return self.folder / "torchrun.log"

    def events(self, rank: int) -> Path:
        return self.folder / f"events-rank{rank}.jsonl"

    def rank_state(self, rank: int) -> Path:
        """Where the rank stood last, see `benchbox.store.rank_state`."""
        return self.folder / f"state-rank{rank}"

    def stack(self, rank: int) -> Path:
        """What the rank was doing when it was asked for it. A rank that can be asked has made the file."""
        return self.folder / f"stack-rank{rank}.txt"

    def result(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.json"

    def prepare(self) -> None:
        """Make the folder anew and write the job: events of an earlier attempt must not speak for this one."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        write_json(self.file, {"kind": self.kind, **self.told, "out": str(self.folder.resolve())})

    def tidy(self) -> None:
        """Remove what was kept ready for a failure that did not come."""
        for rank in range(self.ranks):
            if self.stack(rank).exists() and not self.stack(rank).stat().st_size:
                self.stack(rank).unlink()


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank's process ended, as its parent saw it. A negative code is the number of the signal that ended it."""

    rank: int
    code: int
    noticed_at: float  # unix time in seconds


class RankGroup(Protocol):
    """The processes of one running job."""

    def poll(self) -> int | None:
        """The exit code of the group, or None while it runs."""

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        """Send a signal to ranks, given by the process ids they reported, but not to what they started."""

    def end(self) -> None:
        """End every process of the group and return when none is left; also right after the group ended by itself.

        Raises:
            BenchboxError: a process cannot be ended.
        """

    def failures(self) -> Sequence[RankExit]:
        """The ranks that failed, first noticed first; empty when the launcher cannot know. Meaningful after `end`."""


class Launcher(Protocol):
    """Starts jobs. Ranks speak through the event files of their job, so this is all a launcher has to offer."""

    name: str

    def variables(self, ranks: int) -> Mapping[str, str]:
        """The environment variables it sets for such a group, to be recorded."""

    def start(self, job: Job) -> RankGroup:
        """Start a prepared job without waiting for it."""
