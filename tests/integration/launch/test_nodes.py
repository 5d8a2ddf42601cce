"""A run on two nodes, which are network namespaces: one is switched off, and the same command then completes the run.

A training on them stops after a step when either is asked to.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.load import load_matrix
from benchbox.store.checkpoints import checkpoint_steps, list_checkpoints
from benchbox.store.events import read_events
from tests.support.namespaces import two_hosts
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.namespaces import Host

pytestmark = pytest.mark.ranks

MATRIX = """\
name: nodes
policy: pi05
size: tiny
backend: ddp
world_size: 2
batch: 2
data: synthetic
measure: {warmup_steps: 1, steps: 3, launches: 1}
"""
TRAINING = """\
name: t
policy: value
size: tiny
data: synthetic
backend: ddp
world_size: 2
batch: 16
optim: {lr: 1.0e-3, warmup_steps: 2, total_steps: 8}
steps: 1000
log_every: 1
checkpoint: {every: 500}
"""
LIMIT_S = 240.0
# On a busy machine, two commands may reach their run this far apart. A node that is switched off is lost after as long.
NODE_TIMEOUT_S = {"first": "30", "again": "180"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "nodes.yaml").write_text(MATRIX)
    return folder


def start_nodes(hosts: tuple[Host, Host], folder: Path, attempt: str) -> list[subprocess.Popen[bytes]]:
    """Start the same command on both hosts, the second time by options instead of variables."""
    processes = []
    for rank, host in enumerate(hosts):
        settings = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29517"}
        command = [sys.executable, "-m", "benchbox.cli.app", "run", "nodes.yaml", "--out", "run"]
        command += ["--node-timeout", NODE_TIMEOUT_S[attempt]]
        if attempt == "again":
            command += [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
            settings = {}
        log = folder / f"{attempt}-{rank}.log"
        processes.append(host.start(command, log=log, variables={"OMP_NUM_THREADS": "1", **settings}, folder=folder))
    return processes


def the_record(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("run/cells/*/launch-1.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def records(hosts: tuple[Host, Host], folder: Path) -> dict[str, Any]:
    """Records of the run whose second node was switched off while it built the policy, and of the one that completed it."""
    nodes = start_nodes(hosts, folder, "first")
    deadline = time.monotonic() + LIMIT_S
    while not (begun := list(folder.glob("run/cells/*/launch-1/events-rank1.jsonl"))):
        if time.monotonic() > deadline or all(node.poll() is not None for node in nodes):
            break
        time.sleep(0.1)
    hosts[1].power_off()
    assert begun, "\n".join((folder / f"first-{rank}.log").read_text() for rank in range(2))
    codes = [node.wait(LIMIT_S) for node in nodes]
    records = {"first": the_record(folder) | {"exit_codes": codes}}
    hosts[1].plug_in()
    codes = [node.wait(LIMIT_S) for node in start_nodes(hosts, folder, "again")]
    return records | {"again": the_record(folder) | {"exit_codes": codes}}


def test_a_node_that_is_switched_off_fails_the_cell_with_its_rank_and_does_not_hang(
    records: dict[str, Any], folder: Path
) -> None:
    record = records["first"]
    assert record["status"] == "crash"
    assert (record["error"]["type"], record["error"]["rank"]) == ("Killed", 1)
    assert record["error"]["message"].endswith("(on node 1)")
    assert record["exit_codes"] == [3, -9]
    assert "1 of 1 cells did not end ok" in (folder / "first-0.log").read_text()


def test_the_same_command_on_all_nodes_completes_the_run(records: dict[str, Any], folder: Path) -> None:
    assert records["again"]["status"] == "ok", (folder / "again-0.log").read_text()
    assert records["again"]["exit_codes"] == [0, 0]
    assert "torchrun starts the ranks, since --launcher local forks them on one machine" in (folder / "again-0.log").read_text()


def test_two_nodes_give_the_losses_of_one_bit_for_bit(
    records: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of new interpreters, which torchrun starts on the nodes, and of forked ones."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    matrix = load_matrix(folder / "nodes.yaml")
    launcher = ForkServerLauncher()
    for number in (1, 2):  # from one server: the first group leaves nothing behind in it
        record = launch_cell(
            next(matrix.cells()), matrix.measure, launch=number, folder=folder / f"one-{number}", launcher=launcher
        )
        assert record["status"] == "ok", record["error"]
        assert records["again"]["loss"] == record["loss"]
        assert records["again"]["grad_norm"] == record["grad_norm"]
        assert records["again"]["observed"] == record["observed"]
    launcher.close()
    assert record["environment"]["launcher"] == "fork_server"
    assert "nodes" not in record["environment"]


def test_the_record_has_the_observed_environment_of_each_node(records: dict[str, Any], hosts: tuple[Host, Host]) -> None:
    environment = records["again"]["environment"]
    assert [(node["node"], node["host"], node["ranks"]) for node in environment["nodes"]] == [
        (rank, host.name, [rank]) for rank, host in enumerate(hosts)
    ]
    assert environment["machine"] == environment["nodes"][0]["machine"] + "-2-nodes"
    assert environment["launcher"] == "torchrun"
    assert len(records["again"]["memory"]["per_rank"]) == len(records["again"]["step_time_s"]["per_rank"]) == 2
    assert [host["ranks"] for host in records["again"]["host"]["hosts"]] == [[0], [1]]


def start_training(hosts: tuple[Host, Host], folder: Path) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchbox.cli.app", "train", "t.yaml", "--out", "t", "--resume", "--nnodes", "2"]
    command += ["--master-addr", hosts[0].address, "--master-port", "29518"]
    return [
        host.start(
            [*command, "--node-rank", str(rank)],
            log=folder / f"{rank}.log",
            variables={"OMP_NUM_THREADS": "1"},
            folder=folder,
        )
        for rank, host in enumerate(hosts)
    ]


# The second attempt resumes. Its rank, which its command has asked, takes a later SIGTERM for the same request, as on one node:
# `test_stop_signals.py`.
ATTEMPTS = in_tiers([[(signal.SIGUSR1, False)], [(signal.SIGUSR1, False), (signal.SIGTERM, True)]], lambda case: len(case) == 1)


@pytest.mark.parametrize("attempts", ATTEMPTS)
def test_a_signal_to_another_node_stops_a_training_after_a_step_with_a_checkpoint(
    hosts: tuple[Host, Host], tmp_path: Path, attempts: list[tuple[signal.Signals, bool]]
) -> None:
    """Sent to its command alone, or also to its rank, as Slurm does; the rank is asked by its command first."""
    (tmp_path / "t.yaml").write_text(TRAINING)
    metrics = tmp_path / "t" / "metrics.jsonl"
    for number, also_to_rank in attempts:
        rows = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        nodes = start_training(hosts, tmp_path)
        deadline = time.monotonic() + LIMIT_S
        while not metrics.exists() or len(metrics.read_text().splitlines()) < rows + 2:
            assert all(node.poll() is None for node in nodes), (tmp_path / "0.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (start, *_), _ = read_events(tmp_path / "t" / "launch" / "events-rank1.jsonl")
        nodes[1].send_signal(number)
        if also_to_rank:
            time.sleep(0.5)  # the command asks its rank within this time, and a step takes longer
            with suppress(psutil.NoSuchProcess):
                psutil.Process(start["pid"]).send_signal(number)
        codes = [node.wait(LIMIT_S) for node in nodes]
        log = (tmp_path / "0.log").read_text()
        assert codes == [130, 130], log
        steps = checkpoint_steps(list_checkpoints(tmp_path / "t" / "checkpoints")[-1])
        assert steps == len(metrics.read_text().splitlines()) > rows
        assert f"stopped: asked to stop, after step {steps}" in log
