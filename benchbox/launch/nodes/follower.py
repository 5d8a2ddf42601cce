"""The nodes other than node 0: each starts its ranks of every launch that node 0 announces, until node 0 ends."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchbox.errors import ConfigurationError, Problem, RecordError
from benchbox.launch.fingerprint import benchbox_sha256
from benchbox.launch.job import Job
from benchbox.launch.nodes.files import POLL_S, NodeFile, NodeLostError, NodeWatch
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.supervise.group import never_stop
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchbox.launch.job import RankGroup
    from benchbox.launch.nodes.settings import NodeSettings
    from benchbox.worker.job_file import JobConfig


def follow(
    folder: Path,
    nodes: NodeSettings,
    *,
    stop: Callable[[], bool],
    ask: Callable[[], bool] = never_stop,
    on_line: Callable[[str], None],
) -> bool:
    """Take part in the launches of node 0 until it ends; return False if the user stopped this node before.

    Args:
        folder: the run directory or output folder, shared with node 0.
        stop: polled several times a second; once true, the ranks of this node are ended.
        ask: polled likewise; once true, they get SIGUSR1, on which a training saves and ends on all nodes. Without a launch it
            does what `stop` does.
        on_line: called with a line on every launch.

    Raises:
        ConfigurationError: node 0 does not run in this folder, or has other sources of benchbox.
        NodeLostError: node 0 stopped reporting.
        BenchboxError: a process cannot be ended.
    """
    with NodeFile(folder, nodes.rank) as file:
        coordinator = NodeWatch(folder, 0, nodes.timeout_s)
        if not _wait_for_coordinator(coordinator, folder, nodes, lambda: stop() or ask()):
            return False
        session = coordinator.values["id"]
        problem = _incompatibility(coordinator.values, folder)
        file.update(session=session, problem=problem)
        if problem is not None:
            time.sleep(2 * POLL_S)  # so that node 0 reads it before this node closes its file
            raise ConfigurationError(Problem(coordinator.label, problem))
        on_line(f"node {nodes.rank} joined {coordinator.label}")
        return _Follower(file, coordinator, nodes).run(session, stop, ask, on_line)


def _wait_for_coordinator(coordinator: NodeWatch, folder: Path, nodes: NodeSettings, stop: Callable[[], bool]) -> bool:
    """Wait for a heartbeat of node 0: the file of a run that was killed is there too, but does not change."""
    deadline = time.monotonic() + nodes.timeout_s
    while coordinator.read().get("closed", True) or not coordinator.changes:
        if stop():
            return False
        if time.monotonic() > deadline:
            raise ConfigurationError(
                Problem(
                    str(folder),
                    f"node 0 has not reported here within {nodes.timeout_s:.0f} s",
                    "start the same command there with --node-rank 0; the folder must be shared by all nodes",
                )
            )
        time.sleep(POLL_S)
    return True


def _incompatibility(coordinator: Mapping[str, Any], folder: Path) -> str | None:
    """Return why this node cannot take part, or None."""
    if coordinator["folder"] != str(folder.resolve()):
        return f"the shared folder is {coordinator['folder']} there and {folder.resolve()} on another node: use one path"
    if coordinator["benchbox_sha256"] != benchbox_sha256():
        return "the sources of benchbox differ between the nodes: install the same version on all"
    return None


class _Follower:
    """The launches of one session on this node."""

    def __init__(self, file: NodeFile, coordinator: NodeWatch, nodes: NodeSettings) -> None:
        self._file = file
        self._coordinator = coordinator
        self._nodes = nodes
        self._launcher = TorchrunLauncher(nodes=nodes)
        self._number = 0  # of the last launch that was started, or has ended before
        self._waiting_since: dict[int, float] = {}  # for the files of an announced launch, by its number
        self._job: Job | None = None
        self._group: RankGroup | None = None
        self._has_asked = False
        self._exit_codes: dict[str, int] = {}

    def run(self, session: str, stop: Callable[[], bool], ask: Callable[[], bool], on_line: Callable[[str], None]) -> bool:
        """Take part until node 0 ends (True) or the user stops (False); no process is left on this node."""
        try:
            while not stop() and not (ask() and self._number == 0):
                values = self._coordinator.read()
                if values["id"] != session:
                    raise NodeLostError(f"{self._coordinator.label} was started again; start this node again too")
                if values["closed"]:
                    return True
                if self._coordinator.lost:
                    raise NodeLostError(f"{self._coordinator.label} stopped reporting; start all nodes again")
                launch = values.get("launch")
                if launch is not None and launch["number"] > self._number and self._sees(launch, values["ended"]):
                    on_line(f"launch {launch['number']}: {launch['folder']}")
                    self._start(launch)
                if ask() and not self._has_asked:
                    self._ask()
                if values["ended"] >= self._number or self._has_ended():
                    self._end()
                time.sleep(POLL_S)
            return False
        finally:
            self._end()

    def _sees(self, launch: Mapping[str, Any], ended: int) -> bool:
        """Return whether the job file of a launch is visible here.

        A network file system shows a new folder after up to a minute, and until then the one that had its path before.
        """
        if ended >= launch["number"]:
            self._number = ended
            self._file.update(ended=ended)
            return False
        try:
            visible = read_json(Path(launch["folder"]) / "job.json").get("id")
        except RecordError:
            visible = None
        if visible == launch["id"]:
            return True
        since = self._waiting_since.setdefault(launch["number"], time.monotonic())
        if time.monotonic() - since > self._nodes.timeout_s:
            raise NodeLostError(
                f"{launch['folder']}: the files of launch {launch['number']} are not visible on node {self._nodes.rank} after "
                f"{self._nodes.timeout_s:.0f} s; the folder must be shared by all nodes"
            )
        return False

    def _start(self, launch: Mapping[str, Any]) -> None:
        self._number = launch["number"]
        self._has_asked = False
        folder = Path(launch["folder"])
        self._job = Job(
            config=cast("JobConfig", read_json(folder / "job.json")),
            ranks=launch["ranks"],
            folder=folder,
            timeout_s=None,
            hang_after_s=math.inf,  # node 0 supervises
            nnodes=self._nodes.count,
            node=self._nodes.rank,
        )
        self._group = self._launcher.start(self._job, launch["variables"])

    def _ask(self) -> None:
        """Ask the ranks of this node to stop, as soon as they have started."""
        if self._group is not None and self._job is not None and (pids := self._job.pids_here()):
            self._group.signal_ranks(sorted(pids), signal.SIGUSR1)
            self._has_asked = True

    def _has_ended(self) -> bool:
        if self._group is None:
            return False
        code = self._group.poll()
        if code is not None:
            self._exit_codes[str(self._number)] = code
        return code is not None

    def _end(self) -> None:
        """End what is left of the group on this node, and report that nothing is."""
        if self._group is not None:
            self._group.end()
            self._group = None
            self._file.update(ended=self._number, exit_codes=self._exit_codes)
