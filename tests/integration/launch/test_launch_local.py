"""Real ranks under both real launchers that fail in every known way."""

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchbox.launch.fingerprint import data_sha256
from benchbox.launch.job import Job, Launcher
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.processes import find_processes
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import DataSpec
from tests.support.launchers import MEASURE, DirectLauncher, cell
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.ranks

Launch = Callable[..., dict[str, Any]]

# How a launch is supervised does not depend on the launcher.
forked_by_default = pytest.mark.parametrize(
    "launcher", in_tiers(["torchrun", "fork_server"], "fork_server".__eq__), indirect=True
)
# For launches by a `DirectLauncher`.
any_launcher = pytest.mark.parametrize("launcher", ["fork_server"], indirect=True)


@pytest.fixture
def launch(tmp_path: Path, policy_dir: Path, launcher: Launcher) -> Launch:
    """Launch the stand-in worker with some behaviour, by default under torchrun, and check that no process of it is left."""

    def run(
        behaviour: str, *, ranks: int = 2, measure: Any = MEASURE, data: DataSpec | None = None, **options: Any
    ) -> dict[str, Any]:
        folder = tmp_path / "launch-1"
        options = {"launch": 1, "folder": folder, "launcher": launcher, "policy_dirs": [policy_dir], **options}
        record = launch_cell(cell(behaviour, ranks, data=data or DataSpec()), measure, **options)
        assert find_processes(str(folder)) == []
        return record

    return run


def test_a_healthy_group_is_ok_its_ranks_are_merged_and_daemons_it_left_behind_are_ended(
    launch: Launch, launcher: Launcher, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    data = DataSpec(tokenizer=str(tokenizer))
    record = launch("healthy", data=data)
    assert record["status"] == "ok", record["error"]
    assert record["step_time_s"]["per_rank"] == [[0.1, 0.1], [0.1, 0.1]]
    assert record["environment"]["launcher"] == launcher.name
    assert len(record["environment"]["policy_sha256"]) == 64
    assert record["environment"]["data_sha256"] == data_sha256(data) is not None
    assert not (tmp_path / "launch-1" / "torchrun").exists()  # torchrun's scratch folder


FAULTS = {
    "raises": ("crash", "RuntimeError", 1, "forward"),
    # Rank 0 believes that it failed by itself; torchrun knows how rank 1 ended, and no event told of its last phase.
    "claims_innocence_wrongly": ("crash", "Killed", 1, "optimizer"),
    "stopped": ("hang", "Hang", 1, "forward"),
    "dies_at_import": ("crash", "LaunchError", None, None),
}
# A hang is noticed, and its group ended, by benchbox alone; a rank that raises reports it itself.
LAUNCHED_FAULTS = in_tiers(
    product(["torchrun", "fork_server"], FAULTS), lambda case: case not in {("torchrun", "stopped"), ("torchrun", "raises")}
)


@pytest.mark.parametrize(("launcher", "behaviour"), LAUNCHED_FAULTS, indirect=["launcher"])
def test_a_failure_has_a_type_a_rank_and_a_phase_and_leaves_no_process(behaviour: str, launch: Launch) -> None:
    record = launch(behaviour)
    error = record["error"]
    assert (record["status"], error["type"], error["rank"], error["phase"]) == FAULTS[behaviour], error
    assert record["throughput"] is None


@any_launcher
@pytest.mark.parametrize(
    ("behaviour", "status", "kind"),
    [("unsupported", "unsupported", "UnsupportedError"), ("garbles", "crash", "RecordError"), ("slow", "timeout", "Timeout")],
)
def test_one_rank_alone_fails_in_the_same_words(behaviour: str, status: str, kind: str, launch: Launch) -> None:
    record = launch(behaviour, ranks=1, measure=replace(MEASURE, timeout_s=3.0), launcher=DirectLauncher())
    assert (record["status"], record["error"]["type"]) == (status, kind)


@any_launcher
def test_a_hang_shows_what_the_rank_was_doing(launch: Launch) -> None:
    record = launch("sleeps", ranks=1, launcher=DirectLauncher())
    assert record["status"] == "hang"
    assert "stand_in_worker.py" in record["error"]["traceback"]


def test_a_launcher_that_is_killed_is_named_and_no_rank_is_blamed(launch: Launch, tmp_path: Path) -> None:
    """The parent of the ranks: torchrun, or the leader of a forked group."""

    def kill_parent(_: object) -> None:
        files = [tmp_path / "launch-1" / f"pid{rank}" for rank in range(2)]
        if all(file.exists() for file in files):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(files[0].read_text())).parent().kill()

    error = launch("sleeps", on_progress=kill_parent)["error"]
    assert (error["type"], error["rank"]) == ("Killed", None)
    assert error["message"].startswith("the launcher was ended by SIGKILL")


@forked_by_default
def test_a_rank_that_was_killed_is_no_hang_though_its_launcher_notices_late(launch: Launch, tmp_path: Path) -> None:
    """On a busy machine that takes longer than ranks may be without progress. Here the launcher is stopped for as long."""
    late = []

    def kill_rank_1(_: object) -> None:
        files = [tmp_path / "launch-1" / f"pid{rank}" for rank in range(2)]
        if not late and all(file.exists() for file in files):
            rank_1 = psutil.Process(int(files[1].read_text()))
            parent = rank_1.parent()
            parent.suspend()
            rank_1.kill()
            late.append(threading.Timer(2 * MEASURE.hang_after_s, parent.resume))
            late[0].start()

    record = launch("sleeps", on_progress=kill_rank_1)
    error = record["error"]
    assert (record["status"], error["type"], error["rank"]) == ("crash", "Killed", 1), error


@forked_by_default
def test_a_launch_can_be_stopped_while_it_runs(launch: Launch) -> None:
    progressed = threading.Event()
    record = launch("ignores_sigterm", on_progress=lambda traces: progressed.set(), stop=progressed.is_set)
    assert record["status"] == "interrupted"


def test_ranks_end_when_the_launching_process_is_killed(tmp_path: Path, launcher: Launcher) -> None:
    job = Job(
        ranks=2, config={"kind": "measure", "cell": {"size": "sleeps"}}, folder=tmp_path, timeout_s=None, hang_after_s=60.0
    )
    job.prepare()
    preload = ", preload=['benchbox.store.files']" if isinstance(launcher, ForkServerLauncher) else ""
    code = (
        "import pickle, sys, time\n"
        f"from {type(launcher).__module__} import {type(launcher).__name__} as Launcher\n"
        f"launcher = Launcher(worker_module='tests.support.stand_in_worker'{preload})\n"
        "group = launcher.start(pickle.loads(bytes.fromhex(sys.argv[1])))\n"
        "time.sleep(3600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, pickle.dumps(job).hex()])
    try:
        _wait_until(lambda: (tmp_path / "pid0").exists() and (tmp_path / "pid1").exists())
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
        parent.kill()
        parent.wait()
        _wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    finally:
        for process in find_processes(str(tmp_path)):
            process.kill()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_group_that_a_batch_system_ends_together_with_benchbox_is_interrupted(tmp_path: Path, policy_dir: Path) -> None:
    """Slurm signals all processes of a job at once: the rank is gone before benchbox looks whether it was asked to stop."""
    calls: list[int] = []

    def stop() -> bool:
        pid = tmp_path / "launch-1" / "pid0"
        if not calls and pid.exists():
            calls.append(int(pid.read_text()))
            psutil.Process(calls[0]).kill()
            return False
        return bool(calls)

    options: Any = {"launch": 1, "folder": tmp_path / "launch-1", "policy_dirs": [policy_dir], "stop": stop}
    record = launch_cell(cell("sleeps", 1), MEASURE, launcher=DirectLauncher(), **options)
    assert record["status"] == "interrupted"
