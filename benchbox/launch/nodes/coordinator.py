"""Node 0 of a run on several nodes: announces each launch, starts its own ranks, and waits for the other nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError, Problem
from benchbox.launch.job import Job, Launcher, RankExit, RankGroup, read_rank_exits
from benchbox.launch.nodes.files import POLL_S, NodeFile, NodeLostError, NodeWatch
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.supervise.group import never_stop
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchbox.launch.nodes.settings import NodeSettings

# After the processes of one node have failed, the ranks of the others get this long to fail as well.
_FAILING_LIMIT_S = 15.0


class CoordinatedLauncher(Launcher):
    """Starts every job on all nodes: under torchrun here, and by the followers (`launch.nodes.follower`) on the others."""

    name = "torchrun"

    def __init__(self, nodes: NodeSettings, file: NodeFile, followers: Sequence[NodeWatch]) -> None:
        """Create the launcher of nodes that have joined, see `coordinate`."""
        self.nnodes = nodes.count
        self._launcher = TorchrunLauncher(nodes=nodes)
        self._file = file
        self._followers = followers
        self._number = 0

    def variables(self, ranks: int) -> Mapping[str, str]:
        return self._launcher.variables(ranks)

    def start(self, job: Job) -> RankGroup:
        """Announce a prepared job to the followers and start the ranks of this node.

        Raises:
            NodeLostError: a node has ended or stopped reporting.
        """
        for follower in self._followers:
            _check_present(follower)
        self._number += 1
        variables = dict(self.variables(job.ranks))
        self._file.update(
            launch={
                "number": self._number,
                "folder": str(job.folder.resolve()),
                "id": read_json(job.file)["id"],
                "ranks": job.ranks,
                "variables": variables,
            }
        )
        return _CoordinatedGroup(self._launcher.start(job), job, self._number, self._file, self._followers)


class _CoordinatedGroup(RankGroup):
    def __init__(self, local: RankGroup, job: Job, number: int, file: NodeFile, followers: Sequence[NodeWatch]) -> None:
        self._local = local
        self._job = job
        self._number = number
        self._file = file
        self._followers = followers
        self._failing_since: float | None = None
        self._ended_ranks = False  # of this node, which ran until `end`
        self._lost_node: str | None = None

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit code once all nodes have ended well, or one failed and the ranks here did not follow, or was lost."""
        code = self._local.poll(timeout_s)
        codes: list[int | None] = [follower.read().get("exit_codes", {}).get(str(self._number)) for follower in self._followers]
        if code == 0 and None in codes:
            if self._notice_lost_node():
                return 1
            time.sleep(timeout_s)  # as the poll of the ranks here no longer does
            return None
        if code is not None:
            return next((number for number in (code, *codes) if number), 0)
        if self._notice_lost_node():
            return 1
        if self._failing_since is None and any(codes):
            self._failing_since = time.monotonic()
        if self._failing_since is not None and time.monotonic() - self._failing_since > _FAILING_LIMIT_S:
            return next(number for number in codes if number)
        return None

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        self._local.signal_ranks(pids, number)

    def end(self) -> None:
        """End the ranks of this node and wait for those of the others; a node that is lost is not waited for."""
        self._ended_ranks = self._local.poll() is None
        self._local.end()
        self._file.update(ended=self._number)
        while any(self._is_running(follower) for follower in self._followers):
            time.sleep(POLL_S)

    def failures(self) -> Sequence[RankExit]:
        elsewhere = (read_rank_exits(self._job.on_node(follower.node).exits) for follower in self._followers)
        here = () if self._ended_ranks else self._local.failures()
        return [*here, *(failure for failures in elsewhere for failure in failures)]

    def lost_node(self) -> str | None:
        return self._lost_node

    def _is_running(self, follower: NodeWatch) -> bool:
        return follower.read().get("ended", 0) < self._number and not follower.lost

    def _notice_lost_node(self) -> bool:
        self._lost_node = next((_absence(follower) for follower in self._followers if follower.lost), None)
        return self._lost_node is not None


def wait_for_nodes(file: NodeFile, nodes: NodeSettings, stop: Callable[[], bool] = never_stop) -> CoordinatedLauncher | None:
    """Wait until all nodes have joined node 0, and return their launcher; None if the user stopped before.

    Args:
        file: of node 0, open. The nodes join from then on, and are released when it is closed.
        nodes: their number, and how long each is waited for.
        stop: polled several times a second.

    Raises:
        ConfigurationError: a node has not joined in time, or has other sources of benchbox.
    """
    followers = [NodeWatch(file.folder, node, nodes.timeout_s) for node in range(1, nodes.count)]
    deadline = time.monotonic() + nodes.timeout_s
    while missing := [follower for follower in followers if follower.read().get("session") != file.id]:
        if stop():
            return None
        if time.monotonic() > deadline:
            names = ", ".join(str(follower.node) for follower in missing)
            raise ConfigurationError(
                Problem(
                    str(file.folder),
                    f"node {names} of {nodes.count} did not join within {nodes.timeout_s:.0f} s",
                    f"start the same command there with --node-rank {missing[0].node}; the folder must be shared by all nodes",
                )
            )
        time.sleep(POLL_S)
    for follower in followers:
        if problem := follower.values.get("problem"):
            raise ConfigurationError(Problem(follower.label, problem))
    return CoordinatedLauncher(nodes, file, followers)


def _check_present(follower: NodeWatch) -> None:
    follower.read()
    if follower.lost:
        raise NodeLostError(_absence(follower))


def _absence(follower: NodeWatch) -> str:
    ending = "has ended" if follower.values.get("closed") else "no longer reports"
    return f"{follower.label} {ending}; start the same command on every node again to continue, a training with --resume"
