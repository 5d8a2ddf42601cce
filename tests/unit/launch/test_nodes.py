"""Settings of several nodes, the command that they give torchrun, and the coordination of nodes through files."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.errors import ConfigurationError
from benchbox.launch.job import RankExit, RankGroup
from benchbox.launch.nodes.coordinator import _CoordinatedGroup, wait_for_nodes
from benchbox.launch.nodes.files import NodeFile, NodeLostError, NodeWatch
from benchbox.launch.nodes.follower import follow
from benchbox.launch.nodes.settings import read_node_settings
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.supervise.group import run_group
from benchbox.launch.supervise.trace import Trace
from benchbox.store.environments import merge_environments
from benchbox.store.events import EventWriter
from benchbox.store.files import write_text
from tests.support.nodes import NODES, job

if TYPE_CHECKING:
    from collections.abc import Sequence


OPTIONS: dict[str, Any] = {"nnodes": 2, "node_rank": 1, "master_addr": "a", "master_port": 29500, "timeout_s": 1.0}


def test_the_command_of_a_single_node_is_the_one_it_always_was() -> None:
    assert TorchrunLauncher().command(job(Path("/run/launch-1"), ranks=2)) == [
        *(sys.executable, "-m", "benchbox.launch.process.torchrun", "/run/launch-1/exits.json"),
        *("--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", "/run/launch-1/torchrun"),
        *("--standalone", "--local-addr", "127.0.0.1", "-m", "benchbox.worker", "/run/launch-1/job.json"),
    ]


def test_the_settings_of_several_nodes_reach_torchrun() -> None:
    nodes = replace(NODES, rank=1, master_addr="10.0.0.1", master_port=29511)
    command = TorchrunLauncher(nodes=nodes).command(job(Path("/run/launch-1"), nnodes=2, node=1))
    assert command[3:] == [
        "/run/launch-1/exits-node1.json",
        *("--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", "/run/launch-1/torchrun-node1"),
        *("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29511"),
        *("-m", "benchbox.worker", "/run/launch-1/job.json"),
    ]


def test_threads_are_divided_among_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("benchbox.launch.process.environment.usable_cores", lambda: 8)
    assert TorchrunLauncher(nodes=NODES).variables(4)["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(("here", "threads"), [("3", "3"), ("", "8"), (None, "8")])
def test_threads_that_the_user_has_set_on_a_node_are_not_those_of_node_0(
    here: str | None, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of torchrun runs a command that prints its environment."""
    monkeypatch.setattr(TorchrunLauncher, "command", lambda *_: ["env"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if here is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", here)
    group = TorchrunLauncher(nodes=replace(NODES, rank=1)).start(job(tmp_path), {"OMP_NUM_THREADS": "8"})
    assert group.poll(60.0) == 0
    group.end()
    assert f"OMP_NUM_THREADS={threads}" in job(tmp_path).group_log.read_text().splitlines()


def test_one_node_needs_no_settings() -> None:
    assert read_node_settings(**{**OPTIONS, "nnodes": 1, "node_rank": None, "master_addr": None}) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nnodes": 0}, "--nnodes: 0 nodes cannot run anything"),
        ({"node_rank": None}, "--node-rank: is missing for 2 nodes"),
        ({"node_rank": 2}, "--node-rank: 2 of 2 nodes"),
        ({"master_addr": None}, "--master-addr: is missing for 2 nodes"),
        ({"master_addr": "a; reboot"}, "--master-addr: 'a; reboot' is not an address"),
        ({"master_port": 70000}, "--master-port: 70000 is not a port"),
        ({"timeout_s": 0.0}, "--node-timeout: 0.0 s"),
    ],
)
def test_an_impossible_setting_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace("(", r"\(")):
        read_node_settings(**{**OPTIONS, **changes})


@pytest.mark.parametrize(
    ("line", "option", "where"),
    [
        ("world_size: 3", [], "nodes.yaml:5:13"),
        ("axes: {world_size: [2, 3]}", [], "nodes.yaml:5:20"),
        ("world_size: 2", ["--set", "world_size=3"], "--set world_size=3"),
    ],
)
def test_ranks_that_cannot_be_divided_are_located(
    line: str, option: list[str], where: str, tmp_path: Path, policy_dir: Path
) -> None:
    matrix = tmp_path / "nodes.yaml"
    matrix.write_text(f"name: nodes\npolicy: stand_in\nsize: tiny\nbackend: ddp\n{line}\nbatch: 2\ndata: synthetic\n")
    nodes = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a"]
    result = CliRunner().invoke(app, ["run", str(matrix), "--policy-dir", str(policy_dir), *nodes, *option])
    assert isinstance(result.exception, ConfigurationError)
    message = str(result.exception)
    assert where in message
    assert "3 ranks cannot be divided equally among 2 nodes" in message


def test_a_node_that_does_not_join_is_named_and_not_waited_for_longer(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="node 1 of 2 did not join within 0 s; start the same command there"),
        NodeFile(tmp_path, 0) as file,
    ):
        wait_for_nodes(file, replace(NODES, timeout_s=0.3))


class PreparationError(Exception):
    """Raised in place of the statistics of a dataset."""


def failure_of_node_0(verb: str, folder: Path, policy_dir: Path, ranks: int) -> BaseException | None:
    """Return what ends the command of node 0 of two nodes."""
    file = folder / "nodes.yaml"
    cell = f"name: t\npolicy: stand_in\nsize: tiny\nbackend: ddp\nworld_size: {ranks}\nbatch: 1\ndata: synthetic\nsteps: 4\n"
    file.write_text(cell)
    nodes = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a"]
    options = ["--policy-dir", str(policy_dir), "--out", str(folder / "out"), *nodes]
    return CliRunner().invoke(app, [verb, str(file), *options]).exception


@pytest.mark.parametrize("verb", ["run", "train"])
def test_node_0_reports_while_it_prepares(verb: str, tmp_path: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of a large dataset take longer than the other nodes wait for node 0."""

    def prepare(*_: Any) -> None:
        assert not NodeWatch(tmp_path / "out", 0, 60.0).read()["closed"]
        raise PreparationError

    for module in ("run_here", "statistics"):  # the other way round, the former would import, and keep, the stand-in
        monkeypatch.setattr(f"benchbox.cli.{module}.prepare_statistics", prepare)
    assert isinstance(failure_of_node_0(verb, tmp_path, policy_dir, ranks=2), PreparationError)
    assert NodeWatch(tmp_path / "out", 0, 60.0).read()["closed"]


@pytest.mark.parametrize(("ranks", "failure"), [(16, PreparationError), (18, ConfigurationError)])
def test_the_capacity_of_a_node_is_compared_with_the_ranks_of_one_node(
    ranks: int, failure: type[Exception], tmp_path: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of 8 ranks; those of all nodes may be more."""

    def prepare(*_: Any) -> None:
        raise PreparationError

    monkeypatch.setattr("benchbox.launch.capacity.usable_cores", lambda: 1)
    monkeypatch.setattr("benchbox.cli.run_here.prepare_statistics", prepare)
    assert isinstance(failure_of_node_0("run", tmp_path, policy_dir, ranks), failure)


def test_a_launch_is_not_started_without_a_node_that_ended(tmp_path: Path) -> None:
    """The follower is stopped by its user after it has joined."""
    nodes = replace(NODES, timeout_s=20.0)
    stopped = threading.Event()
    options: Any = {"stop": stopped.is_set, "on_line": lambda _: None}
    follower = threading.Thread(target=follow, args=(tmp_path, replace(nodes, rank=1)), kwargs=options)
    follower.start()
    with NodeFile(tmp_path, 0) as file:
        launcher = wait_for_nodes(file, nodes)
        assert launcher is not None
        stopped.set()
        follower.join()
        with pytest.raises(NodeLostError, match=r"node 1 \(.+\) has ended; start the same command on every node again"):
            launcher.start(job(tmp_path))


@pytest.mark.parametrize("have_started", [False, True])
def test_a_node_that_ends_is_named_and_not_a_rank_of_the_nodes_that_are_left(
    have_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the ranks have started, and later. In place of torchrun, which waits for the other node, runs one that waits."""
    monkeypatch.setattr(TorchrunLauncher, "command", lambda *_: ["sh", "-c", "echo a warning of torch; exec sleep 600"])
    nodes, launch = replace(NODES, timeout_s=60.0), job(tmp_path / "launch", ranks=2, nnodes=2)
    with NodeFile(tmp_path, 0) as file, NodeFile(tmp_path, 1) as follower:
        follower.update(session=file.id)
        launcher = wait_for_nodes(file, nodes)
        assert launcher is not None

        def end_node() -> bool:
            if launch.group_log.stat().st_size:
                for rank in range(2) if have_started else ():
                    EventWriter(launch.events(rank), rank).write("start", pid=os.getpid())
                if have_started:
                    EventWriter(launch.events(1), 1).write("terminated", signal="SIGTERM")
                follower.update(closed=True)
            return False

        outcome = run_group(launch, launcher, stop=end_node)
    assert (outcome.status, outcome.error and outcome.error["rank"]) == ("crash", None)
    assert outcome.error is not None
    ending = f"node 1 ({socket.gethostname()}) has ended; start the same command on every node again to continue, a training"
    start = "" if have_started else "no rank started: "
    assert outcome.error["message"] == f"{start}{ending} with --resume"


class Ranks(RankGroup):
    """The ranks of node 0, which have ended with `code`, or still run."""

    def __init__(self, code: int | None) -> None:
        self._code = code

    def poll(self, timeout_s: float = 0.0) -> int | None:
        return self._code

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        raise AssertionError

    def end(self) -> None:
        raise AssertionError

    def failures(self) -> Sequence[RankExit]:
        return ()


@pytest.mark.parametrize(
    ("here", "there", "timeout_s", "group"),
    [
        (None, {}, 60.0, None),
        (0, {}, 60.0, None),  # the other node needs longer
        (0, {"1": 0}, 60.0, None),  # of the launch before
        (0, {"2": 0}, 60.0, 0),
        (0, {"2": 3}, 60.0, 3),
        (2, {}, 60.0, 2),
        (2, {"2": 3}, 60.0, 2),
        (None, {"2": 0}, 60.0, None),
        (0, {}, -1.0, 1),  # the other node is lost
        (None, {}, -1.0, 1),
    ],
)
def test_a_launch_has_ended_when_it_has_on_all_nodes_or_failed_on_one(
    here: int | None, there: dict[str, int], timeout_s: float, group: int | None, tmp_path: Path
) -> None:
    """The exit codes of node 1 are by number of the launch; the second is asked for."""
    follower = NodeFile(tmp_path, 1)
    (tmp_path / "nodes").mkdir()
    follower.update(exit_codes=there)
    watch = NodeWatch(tmp_path, 1, timeout_s)
    assert _CoordinatedGroup(Ranks(here), job(tmp_path), 2, NodeFile(tmp_path, 0), [watch]).poll() == group


class EndedRanks(Ranks):
    """Ranks of node 0 of which the first has been killed, by whomever."""

    def end(self) -> None:
        pass

    def failures(self) -> Sequence[RankExit]:
        return [RankExit(0, -9, 1.0)]


@pytest.mark.parametrize(("code_before_end", "failed"), [(1, [0, 1]), (None, [1])])
def test_ranks_that_run_until_another_node_has_failed_have_not_failed_themselves(
    code_before_end: int | None, failed: list[int], tmp_path: Path
) -> None:
    follower, launch = NodeFile(tmp_path, 1), job(tmp_path)
    follower.update(ended=1)
    write_text(launch.on_node(1).exits, '[{"rank": 1, "code": 3, "noticed_at": 1.0}]')
    watch = NodeWatch(tmp_path, 1, 60.0)
    group = _CoordinatedGroup(EndedRanks(code_before_end), launch, 1, NodeFile(tmp_path, 0), [watch])
    group.end()
    assert [failure.rank for failure in group.failures()] == failed


def test_the_end_of_a_launch_does_not_wait_for_a_node_that_is_lost(tmp_path: Path) -> None:
    watch = NodeWatch(tmp_path, 1, -1.0)
    group = _CoordinatedGroup(EndedRanks(None), job(tmp_path), 1, NodeFile(tmp_path, 0), [watch])
    ending = threading.Thread(target=group.end, daemon=True)
    ending.start()
    ending.join(10.0)
    assert not ending.is_alive()


def test_a_poll_takes_its_time_also_when_only_other_nodes_still_run(tmp_path: Path) -> None:
    """Whoever polls in a loop would else keep a core busy, and read the files of the nodes all the time."""
    NodeFile(tmp_path, 1)
    group = _CoordinatedGroup(Ranks(0), job(tmp_path), 1, NodeFile(tmp_path, 0), [NodeWatch(tmp_path, 1, 60.0)])
    start = time.monotonic()
    assert group.poll(0.2) is None
    assert time.monotonic() - start >= 0.2


def test_ranks_here_get_some_time_to_fail_after_those_of_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank in a collective fails by itself once its peers are gone, and says where."""
    follower = NodeFile(tmp_path, 1)
    (tmp_path / "nodes").mkdir()
    follower.update(exit_codes={"1": 3})
    group = _CoordinatedGroup(Ranks(None), job(tmp_path), 1, NodeFile(tmp_path, 0), [NodeWatch(tmp_path, 1, 60.0)])
    assert group.poll() is None
    monkeypatch.setattr("benchbox.launch.nodes.coordinator._FAILING_LIMIT_S", 0.0)
    assert group.poll() == 3


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("benchbox_sha256", "other", "the sources of benchbox differ"),
        ("folder", "/elsewhere", "the shared folder is /elsewhere there"),
    ],
)
def test_a_node_with_other_sources_or_another_path_is_refused_on_both_sides(
    field: str, value: str, words: str, tmp_path: Path
) -> None:
    with NodeFile(tmp_path, 0) as file:
        file.update(**{field: value})
        with pytest.raises(ConfigurationError, match=words):
            follow(tmp_path, replace(NODES, rank=1, timeout_s=20.0), stop=lambda: False, on_line=print)
        with pytest.raises(ConfigurationError, match=rf"node 1 \(.+\): {words}"):
            wait_for_nodes(file, NODES)


def test_times_of_a_remote_rank_are_read_by_the_clock_of_this_host() -> None:
    """Its clock is 1000 s ahead; the event that was read the soonest tells by how much."""
    trace = Trace(1, remote=True)
    for sent, read in [(1000.0, 3.0), (1010.0, 10.5), (1020.0, 22.0)]:
        event = {"monotonic_s": sent, "event": "heartbeat", "stage": "train", "step": 1, "phase": "forward", "since": sent}
        trace.receive(event, read)
    assert trace.last_event_at == 1020.0 - 999.5
    assert trace.state is not None
    assert trace.state.since == pytest.approx(3.0)  # as it was known when the state was entered


def test_launches_on_different_numbers_of_nodes_are_of_different_machines() -> None:
    """`machine` selects the baseline, and cells of different machines are not compared."""

    def ranks(*nodes: tuple[int, str]) -> Any:
        return [
            {"rank": rank, "environment": {"machine": machine, "node": node, "host": f"host{node}"}}
            for rank, (node, machine) in enumerate(nodes)
        ]

    assert merge_environments([{"rank": 0, "environment": {"machine": "h100"}}])["machine"] == "h100"  # type: ignore[typeddict-item]
    assert merge_environments(ranks((0, "h100"), (0, "h100"), (1, "h100")))["machine"] == "h100-2-nodes"
    mixed = merge_environments(ranks((0, "h100"), (1, "a100"), (2, "h100")))
    assert mixed["machine"] == "a100-and-h100-3-nodes"
    assert [node["ranks"] for node in mixed["nodes"]] == [[0], [1], [2]]
    assert not {"node", "host"} & mixed.keys(), "those of node 0 are not those of the launch"


def test_a_heartbeat_outlives_an_error_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a server that does not answer for a moment, loses no node."""
    from benchbox.launch.nodes import files

    through, failures, failed = files.write_json, [OSError(28, "No space left on device")], threading.Event()

    def write(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and failures:
            failed.set()
            raise failures.pop()
        through(*arguments, **options)

    monkeypatch.setattr(files, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(files, "write_json", write)
    with NodeFile(tmp_path, 1):
        assert failed.wait(60)
        watch = NodeWatch(tmp_path, 1, 60.0)
        before, deadline = watch.read()["beat"], time.monotonic() + 60
        while watch.read()["beat"] == before:
            assert time.monotonic() < deadline, "no beat after the error"
            time.sleep(0.01)


def test_a_node_ends_with_its_own_error_where_its_file_cannot_be_written(tmp_path: Path) -> None:
    """The disk that ended the run is still full; the other nodes notice that the heartbeat is missing."""

    def lose_folder() -> None:
        (tmp_path / "nodes").rename(tmp_path / "moved")
        (tmp_path / "nodes").touch()
        raise PreparationError

    with pytest.raises(PreparationError), NodeFile(tmp_path, 1):
        lose_folder()
