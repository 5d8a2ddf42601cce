"""A job for a group of ranks, the files it leaves, and the interface of a launcher that runs it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

from benchbox.errors import ConfigurationError, Problem, RecordError
from benchbox.store.events import read_events
from benchbox.store.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchbox.worker.job_file import JobConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work for a group of ranks. Everything it leaves is in `folder`, which no other job uses."""

    config: JobConfig  # read by the worker
    ranks: int
    folder: Path
    timeout_s: float | None  # start to end; None: no limit
    hang_after_s: float  # without progress of any rank
    nnodes: int = 1
    node: int = 0  # that starts its part of the ranks from this object

    def on_node(self, node: int) -> Job:
        """Return the same job as another node starts it, with files of its own for what concerns one node."""
        return replace(self, node=node)

    def node_of(self, rank: int) -> int:
        """Return the node of a rank: nodes have equally many, in order."""
        return rank // (self.ranks // self.nnodes)

    @property
    def job_id(self) -> str:
        """Value of the variable by which the processes of this job on this node are found."""
        return f"{self.folder.resolve()}{self._suffix}"

    @property
    def _suffix(self) -> str:
        return f"-node{self.node}" if self.node else ""

    @property
    def file(self) -> Path:
        """Job file, the argument of the worker."""
        return self.folder / "job.json"

    @property
    def group_log(self) -> Path:
        """Log of the process that starts the ranks, and of ranks until they open a log of their own."""
        return self.folder / f"torchrun{self._suffix}.log"

    @property
    def torchrun_folder(self) -> Path:
        """Log folder that torchrun needs, by default a new one in /tmp. Removed when the group has ended."""
        return self.folder / f"torchrun{self._suffix}"

    @property
    def exits(self) -> Path:
        """File of the failed ranks, see `read_rank_exits`."""
        return self.folder / f"exits{self._suffix}.json"

    def events(self, rank: int) -> Path:
        return self.folder / f"events-rank{rank}.jsonl"

    def pids_here(self) -> set[int]:
        """Return the process ids of the ranks of this node, as far as these have started: each has written its own."""
        ranks = (rank for rank in range(self.ranks) if self.node_of(rank) == self.node)
        return {event["pid"] for rank in ranks for event in read_events(self.events(rank))[0] if "pid" in event}

    def rank_state(self, rank: int) -> Path:
        """Path of the rank's current state, see `benchbox.store.rank_state`."""
        return self.folder / f"state-rank{rank}"

    def stack(self, rank: int) -> Path:
        """Path of the stacks that the rank dumps on SIGUSR2. It creates the file once it handles that signal."""
        return self.folder / f"stack-rank{rank}.txt"

    def collectives(self, rank: int) -> Path:
        """Path of the rank's last collectives, see `benchbox.store.rank_collectives`."""
        return self.folder / f"collectives-rank{rank}.json"

    def result(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.json"

    def check_folder(self) -> None:
        """Raise ConfigurationError if the folder holds files and no job of benchbox: `prepare` would delete them."""
        if not self.was_prepared and self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            message = "exists, and is no folder of benchbox, which would empty it"
            raise ConfigurationError(Problem(str(self.folder), message, "name another directory with --out"))

    @property
    def was_prepared(self) -> bool:
        """Return whether the folder holds the files of an earlier attempt."""
        try:
            return "kind" in read_json(self.file)
        except RecordError:
            return False

    def prepare(self) -> None:
        """Create an empty folder, removing the files of an earlier attempt, and write the job file.

        Its `id` is new: another node may still see the folder that was here before.

        Raises:
            ConfigurationError: the folder was not made by benchbox.
        """
        self.check_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path == self.file:  # stays until it is replaced: a folder without it would not be recognised after a kill
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        write_json(self.file, {**self.config, "out": str(self.folder.resolve()), "id": uuid4().hex})

    def remove_empty_stacks(self) -> None:
        """Remove the stack files of ranks that were never asked for a stack."""
        for rank in range(self.ranks):
            if self.stack(rank).exists() and not self.stack(rank).stat().st_size:
                self.stack(rank).unlink()


@dataclass(frozen=True, slots=True)
class RankExit:
    """Exit of a rank's process as its parent saw it. A negative code is the number of the signal that ended it."""

    rank: int
    code: int
    noticed_at: float  # seconds of any one clock: only the differences between ranks count


def read_rank_exits(path: Path) -> Sequence[RankExit]:
    """Return the failures that the parent of the ranks wrote; none if no rank failed or the parent was killed."""
    try:
        rank_exits = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return ()
    return tuple(RankExit(**rank_exit) for rank_exit in rank_exits)


class RankGroup(Protocol):
    """The processes of one running job."""

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit code of the group, or None if it still runs after `timeout_s` seconds."""

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        """Send a signal to ranks of this node, by the process ids that they reported, but not to their children."""

    def end(self) -> None:
        """End every process of the group and return when none is left; also right after the group ended by itself.

        Raises:
            BenchboxError: a process cannot be ended.
        """

    def failures(self) -> Sequence[RankExit]:
        """Return the ranks that failed in the order they were noticed, or nothing where the launcher cannot know.

        Valid after `end`.
        """

    def lost_node(self) -> str | None:
        """Return a line about the node whose loss ended the group, with the remedy; None if none was lost."""
        return None


class Launcher(Protocol):
    """Starts jobs. Ranks report through the event files of their job, so a launcher only has to start and end them."""

    name: str
    nnodes: int = 1

    def variables(self, ranks: int) -> Mapping[str, str]:
        """Return the environment variables that the launcher sets for a group of this size; they are recorded."""

    def start(self, job: Job) -> RankGroup:
        """Start a prepared job without waiting for it."""
