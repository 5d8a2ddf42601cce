"""Real ranks under real torchrun, failing in every way there is."""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from launching import MEASURE, MakeJob

from benchbox.launch.local import LocalLauncher
from benchbox.launch.once import launch_once
from benchbox.launch.processes import marked

pytestmark = pytest.mark.ranks


def test_a_healthy_group_is_ok_and_its_ranks_are_merged(make_job: MakeJob, launcher: LocalLauncher) -> None:
    job = make_job("healthy")
    record = launch_once(job, launcher)
    assert record["status"] == "ok", record["error"]
    assert record["step_time_s"]["per_rank"] == [[0.1, 0.1], [0.1, 0.1]]
    assert record["environment"]["launcher"] == "local"
    assert set(record["environment"]["set_by_launcher"]) <= {"OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"}
    assert len(record["environment"]["policy_sha256"]) == 64
    assert not (job.folder / "torchrun").exists()  # torchrun's scratch folder


@pytest.mark.parametrize(
    ("behaviour", "status", "kind", "rank", "phase"),
    [
        ("raises", "crash", "RuntimeError", 1, "forward"),
        ("killed", "crash", "Killed", 1, "forward"),
        # Rank 0 believes that it failed by itself; the kernel knows better.
        ("claims_innocence_wrongly", "crash", "Killed", 1, "forward"),
        ("stopped", "hang", "Hang", 1, "forward"),
        ("ignores_sigterm", "hang", "Hang", 1, "forward"),
        ("unsupported", "unsupported", "UnsupportedError", None, "forward"),
        ("dies_at_import", "crash", "LaunchError", None, None),
        ("garbles", "crash", "RecordError", None, None),
    ],
)
def test_a_failure_has_a_type_a_rank_and_a_phase_and_leaves_no_process(
    behaviour: str, status: str, kind: str, rank: int | None, phase: str | None, make_job: MakeJob, launcher: LocalLauncher
) -> None:
    job = make_job(behaviour)
    record = launch_once(job, launcher)
    error = record["error"]
    assert (record["status"], error["type"], error["phase"]) == (status, kind, phase), error
    if behaviour != "unsupported":  # all its ranks say so
        assert error["rank"] == rank
    assert marked(str(job.folder.resolve())) == []
    assert record["throughput"] is None


def test_a_launch_that_progresses_for_too_long_is_a_timeout(make_job: MakeJob, launcher: LocalLauncher) -> None:
    record = launch_once(make_job("slow", 1, replace(MEASURE, timeout_s=6.0, hang_after_s=60.0)), launcher)
    assert (record["status"], record["error"]["rank"], record["error"]["phase"]) == ("timeout", 0, "forward")
    assert record["duration_s"] < 20


def test_a_daemon_left_behind_by_a_finished_rank_is_ended(make_job: MakeJob, launcher: LocalLauncher) -> None:
    job = make_job("leaves_children")
    record = launch_once(job, launcher)
    assert record["status"] == "ok"
    assert marked(str(job.folder.resolve())) == []


def test_a_launch_can_be_stopped_while_it_runs(make_job: MakeJob, launcher: LocalLauncher) -> None:
    job = make_job("sleeps")
    asked = threading.Event()
    record = launch_once(job, launcher, on_move=lambda traces: asked.set(), stop=asked.is_set)
    assert record["status"] == "interrupted"
    assert marked(str(job.folder.resolve())) == []


def test_ranks_end_when_the_launching_process_is_killed(make_job: MakeJob, launcher: LocalLauncher) -> None:
    job = make_job("sleeps")
    job.prepare()
    code = (
        "import sys, time, pickle\n"
        "from benchbox.launch.local import LocalLauncher\n"
        "LocalLauncher(worker_module='stand_in_worker').start(pickle.loads(bytes.fromhex(sys.argv[1])))\n"
        "time.sleep(3600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, pickle.dumps(job).hex()])
    mark = str(job.folder.resolve())
    try:
        _until(lambda: (job.folder / "pid0").exists() and (job.folder / "pid1").exists())
        parent.kill()
        parent.wait()
        _until(lambda: not marked(mark))
    finally:
        for process in marked(mark):
            process.kill()


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_variables_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0))
    assert LocalLauncher().variables(2) == {
        "OMP_NUM_THREADS": str(max(1, cores // 2)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert LocalLauncher().variables(10_000)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert LocalLauncher().variables(2) == {}
