"""Launches that are forked from a server: as fresh as those of new interpreters, and as well supervised."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchbox.launch.job import Job, read_rank_exits
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.environment import host_variables
from benchbox.launch.process.warm import SHARED_SERVERS_VARIABLE, ForkServerLauncher, _OwnServer
from benchbox.spec.cell import MeasureSpec
from tests.support.fork_servers import start_shared_server
from tests.support.launchers import MEASURE, cell
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.ranks

WORKER = """\
import gc, json, os, pathlib, psutil, random, sys
out = pathlib.Path(json.loads(pathlib.Path(sys.argv[1]).read_text())["out"])
report = {
    "random": random.random(),
    "numpy": sys.modules["numpy"].random.random() if "numpy" in sys.modules else None,
    "server": psutil.Process(os.getppid()).ppid(),
    "variable": os.environ.get("TOLD"),
    "launcher": os.environ.get("BENCHBOX_LAUNCHER"),
    "job": os.environ.get("BENCHBOX_JOB"),
    "folder": os.getcwd(),
    "arguments": sys.argv[1:],
    "rank": os.environ["RANK"],
    "pid": os.getpid(),
    "session": os.getsid(0),
    "frozen": gc.get_freeze_count(),
    "collects": gc.isenabled(),
}
if "policy" in os.environ.get("TOLD", ""):
    from benchbox.registry import extensions, policies

    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    entry = policies.policy_entry(job["cell"]["policy"], list(map(pathlib.Path, job["policy_dirs"])))
    report["presets"] = {size: dict(values) for size, values in entry.presets.items()}
    report["parsed"] = policies._parse_presets.cache_info().currsize, policies._parse_presets.cache_info().hits
    report["scans"] = extensions._all_entry_points.cache_info().misses
written = out / f"report{os.environ['RANK']}.json"
written.with_suffix(".part").write_text(json.dumps(report))
written.with_suffix(".part").rename(written)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServerLauncher]:
    (tmp_path / "reporting_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = ForkServerLauncher(worker_module="reporting_worker", preload=["random"], grace_s=1.0)
    yield launcher
    launcher.close()


def run(launcher: ForkServerLauncher, folder: Path, ranks: int = 2, **config: Any) -> list[dict[str, Any]]:
    """Run the reporting worker to its end and return the reports of its ranks."""
    job = Job(config={"kind": "report", **config}, ranks=ranks, folder=folder, timeout_s=60.0, hang_after_s=60.0)
    job.prepare()
    group = launcher.start(job)
    wait_until(lambda: group.poll() is not None)
    assert group.poll() == 0, job.group_log.read_text()
    group.end()
    return [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(ranks)]


def test_ranks_find_presets_parsed_and_distributions_searched_until_a_file_changes(
    launcher: ForkServerLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_dir: Path
) -> None:
    monkeypatch.setenv("TOLD", "read the policy")
    config = {"kind": "measure", "cell": {"policy": "stand_in"}, "policy_dirs": [str(policy_dir)]}
    presets = policy_dir / "stand_in" / "presets.yaml"
    for size in ("tiny", "small"):
        presets.write_text(f"{size}: {{layers: 2}}\n")
        for report in run(launcher, tmp_path / size, **config):
            assert report["presets"] == {size: {"layers": 2}}
            files, hits = report["parsed"]
            assert (files, hits) == ({"tiny": 1, "small": 2}[size], 1), "the server parsed it, and this rank found it"
            assert report["scans"] == 1, "that of the server"
    presets.write_text("tiny: [\n")
    with pytest.raises(AssertionError, match="not YAML"):  # it is the business of the ranks
        run(launcher, tmp_path / "damaged", **config)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_differ_in_what_is_random_and_agree_in_where_they_run(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    reports = run(launcher, tmp_path / "job")
    assert len({report["random"] for report in reports}) == len({report["numpy"] for report in reports}) == 2
    assert [report["rank"] for report in reports] == ["0", "1"]
    for report in reports:
        assert report["folder"] == str(Path.cwd())
        assert report["job"] == str(tmp_path / "job"), "by which processes are found whose parents have ended"
        assert report["launcher"] == str(os.getpid()), "by which a rank tells whether its launcher got a signal"
        assert report["arguments"] == [str(tmp_path / "job" / "job.json")]


def test_the_exit_of_a_failed_rank_is_in_the_file_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_worker.py").write_text(
        "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = ForkServerLauncher(worker_module="failing_worker", preload=["random"], grace_s=1.0)
    job = Job(config={"kind": "report"}, ranks=2, folder=tmp_path / "job", timeout_s=60.0, hang_after_s=60.0)
    job.prepare()
    group = launcher.start(job)
    assert group.poll(60.0) == 1
    group.end()
    launcher.close()
    assert [(rank_exit.rank, rank_exit.code) for rank_exit in read_rank_exits(job.exits)] == [(1, 7)]


def test_ctrl_c_on_the_terminal_reaches_neither_a_server_nor_its_ranks(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    """The terminal sends it within its own session: to the command, which ends the ranks after their step."""
    (report,) = run(launcher, tmp_path / "job", ranks=1)
    assert len({os.getsid(0), os.getsid(report["server"]), report["session"]}) == 3


def test_no_collection_of_a_rank_visits_what_its_server_imported(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    assert all(report["frozen"] > 0 and report["collects"] for report in run(launcher, tmp_path / "job"))


def test_one_poll_waits_for_the_end_of_a_group(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    job = Job(config={"kind": "report"}, ranks=1, folder=tmp_path / "job", timeout_s=60.0, hang_after_s=60.0)
    job.prepare()
    group = launcher.start(job)
    assert group.poll(60.0) == 0, job.group_log.read_text()
    group.end()


def test_the_tests_of_this_run_share_servers() -> None:
    """Otherwise every launch of every test imports torch, and nothing but the time tells."""
    launcher = ForkServerLauncher()
    environment = {**os.environ, **host_variables(os.environ), **launcher.variables(2)}
    assert launcher._server(environment).greeting is not None
    assert not isinstance(launcher._server(environment), _OwnServer)
    launcher.close()


def test_launches_share_a_server_unless_their_environment_differs(
    launcher: ForkServerLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(launcher, tmp_path / "first", ranks=1)[0]
    monkeypatch.setenv("COLUMNS", "123")  # of the terminal: no import depends on it
    second = run(launcher, tmp_path / "second", ranks=1)[0]
    monkeypatch.setenv("TOLD", "something else")
    other = run(launcher, tmp_path / "other", ranks=1)[0]
    assert first["server"] == second["server"] != other["server"]
    assert (second["variable"], other["variable"]) == (None, "something else")


def test_a_module_that_cannot_be_imported_is_the_business_of_the_rank_that_needs_it(launcher, tmp_path: Path) -> None:
    launcher = ForkServerLauncher(worker_module="reporting_worker", preload=["no_such_module"])
    assert len(run(launcher, tmp_path / "job")) == 2
    launcher.close()


THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"


@pytest.mark.parametrize(
    ("module", "reason", "launches"),
    [("threaded", "by the import of threaded", 2), ("sitecustomize", "threads were started before the fork: [", 1)],
)
def test_where_a_thread_was_started_before_the_fork_launches_use_new_interpreters(
    tmp_path: Path,
    policy_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    reason: str,
    launches: int,
) -> None:
    """Threads of an import of the server, or of what ran before it, which a forked child would not have."""
    (tmp_path / f"{module}.py").write_text(THREAD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    launcher = ForkServerLauncher(worker_module="tests.support.stand_in_worker", preload=["threaded"], grace_s=1.0)
    options = {"launcher": launcher, "policy_dirs": [policy_dir]}
    for number in range(1, launches + 1):
        record = launch_cell(cell("healthy", 1), MEASURE, launch=number, folder=tmp_path / f"launch-{number}", **options)
        assert record["status"] == "ok", record["error"]
        assert record["environment"]["launcher"] == "torchrun"
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(
        "warning: every launch starts new interpreters, which takes longer: the fork server could not start"
    )
    assert reason in warning


def test_a_killed_server_takes_its_ranks_along_and_the_next_launch_has_another(
    tmp_path: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    launcher = ForkServerLauncher(worker_module="tests.support.stand_in_worker", preload=["random"], grace_s=1.0)
    pids: list[int] = []

    def kill_server(_: Any) -> None:
        files = [tmp_path / "killed" / f"pid{rank}" for rank in range(2)]
        if not pids and all(file.exists() for file in files):
            pids.extend(int(file.read_text()) for file in files)
            psutil.Process(psutil.Process(pids[0]).ppid()).parent().kill()

    options = {"launcher": launcher, "policy_dirs": [policy_dir]}
    killed = launch_cell(cell("sleeps"), MEASURE, launch=1, folder=tmp_path / "killed", on_progress=kill_server, **options)
    assert pids
    assert (killed["status"], killed["error"]["type"], killed["error"]["rank"]) == ("crash", "Killed", None)
    assert killed["error"]["message"].startswith("the launcher was ended by SIGKILL")
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))  # init reaps them
    healthy = launch_cell(cell("healthy"), MEASURE, launch=1, folder=tmp_path / "healthy", **options)
    assert healthy["status"] == "ok", healthy["error"]
    launcher.close()


def test_a_launcher_is_closed_after_a_request_that_its_killed_server_did_not_get(tmp_path: Path, launcher: Any) -> None:
    job = Job(config={"kind": "report"}, ranks=1, folder=tmp_path / "job", timeout_s=60.0, hang_after_s=60.0)
    job.prepare()
    group = launcher.start(job)
    (server,) = launcher._servers.values()
    server._process.kill()
    server._process.wait()
    assert group.poll() == -signal.SIGKILL
    launcher.close()


@pytest.fixture
def shared_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Start a shared server that has imported next to nothing; return its process id."""
    (tmp_path / "reporting_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = Path(tempfile.mkdtemp())  # the path of a socket must be short
    monkeypatch.setenv(SHARED_SERVERS_VARIABLE, str(folder))
    process = start_shared_server(folder / "test.sock", ranks=2, log=folder / "log", preload=["random"])
    yield process.pid
    process.kill()
    process.wait()
    shutil.rmtree(folder)


def server_above(report: dict[str, Any]) -> int:
    """Return the process that the server of a client was forked from."""
    return psutil.Process(report["server"]).ppid()


def test_clients_in_one_environment_share_a_server(shared_server: int, tmp_path: Path) -> None:
    launchers = [ForkServerLauncher(worker_module="reporting_worker") for _ in range(2)]
    reports = [run(launcher, tmp_path / str(index))[0] for index, launcher in enumerate(launchers)]
    assert [server_above(report) for report in reports] == [shared_server] * 2
    launchers[0].close()
    assert server_above(run(launchers[1], tmp_path / "again")[0]) == shared_server, "another client ended, not the server"
    launchers[1].close()


@pytest.mark.usefixtures("shared_server")
def test_a_shared_server_that_imported_in_another_environment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    class NoServerError(Exception):
        pass

    def refuse(_: Any, environment: dict[str, str], *__: Any) -> None:
        started.append(environment)
        raise NoServerError

    monkeypatch.setattr("benchbox.launch.process.warm._OwnServer.__init__", refuse)
    monkeypatch.setenv("TOLD", "something else")
    with pytest.raises(NoServerError):
        run(ForkServerLauncher(worker_module="reporting_worker"), tmp_path / "job")
    monkeypatch.delenv("TOLD")
    run(ForkServerLauncher(worker_module="reporting_worker"), tmp_path / "job")
    assert [environment["TOLD"] for environment in started] == ["something else"]


def test_ranks_of_a_shared_server_end_with_their_client_or_with_the_server(shared_server: int, tmp_path: Path) -> None:
    def sleeping(name: str) -> tuple[ForkServerLauncher, int]:
        (tmp_path / "sleeping_worker.py").write_text(WORKER + "import time\ntime.sleep(600)\n")
        launcher = ForkServerLauncher(worker_module="sleeping_worker")
        job = Job(config={"kind": "report"}, ranks=2, folder=tmp_path / name, timeout_s=60.0, hang_after_s=60.0)
        job.prepare()
        launcher.start(job)
        wait_until((job.folder / "report0.json").exists)
        report = json.loads((job.folder / "report0.json").read_text())
        assert server_above(report) == shared_server
        return launcher, report["pid"]

    client, rank = sleeping("client")
    client.close()
    wait_until(lambda: not psutil.pid_exists(rank))
    assert psutil.pid_exists(shared_server)
    _, rank = sleeping("server")
    psutil.Process(shared_server).kill()
    wait_until(lambda: not psutil.pid_exists(rank))


@pytest.mark.exhaustive  # `test_nodes.py` compares torchrun with forked groups by default
@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_losses_of_forked_and_of_new_interpreters_are_equal_bit_for_bit(backend: str, tmp_path: Path) -> None:
    measure = MeasureSpec(warmup_steps=1, steps=3, launches=1, timeout_s=240.0)
    warm = ForkServerLauncher()
    records = [
        launch_cell(tiny_cell(backend=backend), measure, launch=1, folder=tmp_path / str(index), launcher=launcher)
        for index, launcher in enumerate((TorchrunLauncher(), warm, warm))
    ]
    warm.close()
    assert [record["status"] for record in records] == ["ok"] * 3, [record["error"] for record in records]
    assert records[0]["loss"] == records[1]["loss"] == records[2]["loss"]
    assert records[0]["grad_norm"] == records[1]["grad_norm"] == records[2]["grad_norm"]
    assert records[0]["observed"] == records[1]["observed"]
    assert [record["environment"]["launcher"] for record in records] == ["torchrun", "fork_server", "fork_server"]
