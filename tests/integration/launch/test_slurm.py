"""`--launcher slurm` with a real Slurm: a job is followed, cancelled, and submitted again for what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import takewhile
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.slurm.job import SlurmJob
from tests.support.namespaces import two_hosts
from tests.support.slurm import private_slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.ranks

MATRIX = """\
name: jobs
policy: pi05
size: tiny
backend: single
world_size: 1
batch: 2
data: synthetic
measure: {warmup_steps: 1, steps: 2, launches: 1}
"""
TRAINING = MATRIX.partition("measure")[0] + "steps: 3\nlog_every: 1\ncheckpoint: {every: 2, keep: 1}\n"
HOSTILE = "out $(touch pwned) '; touch pwned; %j"
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a matrix and a training file; commands reach a private Slurm."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "jobs.yaml").write_text(MATRIX)
    (folder / "train.yaml").write_text(TRAINING)
    with private_slurm() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in (variables | {"OMP_NUM_THREADS": "1"}).items():
            patch.setenv(name, value)
        yield folder


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchbox.cli.app", "run", "jobs.yaml", "--out", HOSTILE, "--launcher", "slurm", *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    return process.returncode, stdout, stderr


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def set_partition(state: str) -> None:
    name = subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True, check=True).stdout.split()[0]
    subprocess.run(["scontrol", "update", f"PartitionName={name}", f"State={state}"], check=True)


def runs_after(job: int | None, out: Path) -> bool:
    current = SlurmJob(out)
    return current.id != job and current.id is not None and current.state().state == "RUNNING"


@pytest.fixture(scope="module")
def completed(folder: Path) -> Path:
    """The run directory of a job whose submitting command was killed; the same command followed it to its end.

    No job starts until the second command follows, so that the first one cannot be done by then.
    """
    out = folder / HOSTILE
    set_partition("DOWN")
    first = start(folder)
    wait_until(lambda: SlurmJob(out).id is not None)
    first.kill()
    first.communicate()
    second = start(folder)
    assert second.stdout is not None
    followed = second.stdout.readline()
    set_partition("UP")
    code, stdout, stderr = finish(second)
    assert code == 0, stdout + stderr
    assert "Slurm job 1 of this folder is not done: following it instead of submitting another" in followed + stdout
    assert "Slurm job 1: COMPLETED" in stdout
    assert "[1/1]" in stdout, "the output of the job is passed on"
    return out


def test_a_job_completes_the_run_also_under_names_that_a_shell_would_execute(completed: Path) -> None:
    (record,) = completed.glob("cells/*/launch-1.json")
    assert json.loads(record.read_text())["status"] == "ok"
    assert (completed / "report.html").exists()
    assert list(completed.parent.rglob("pwned")) == []
    assert (completed / "slurm/job-1.log").exists()


def test_no_job_is_submitted_for_a_run_that_is_complete(completed: Path) -> None:
    code, stdout, _ = finish(start(completed.parent))
    assert code == 0
    assert "all 1 launches are done already: no job was submitted" in stdout
    assert SlurmJob(completed).id == 1


def test_a_cancelled_job_is_typed_and_ctrl_c_cancels_the_next_which_runs_only_what_is_missing(completed: Path) -> None:
    previous = SlurmJob(completed).id
    cancelled = start(completed.parent, "--launches", "2")
    wait_until(lambda: runs_after(previous, completed))
    job = SlurmJob(completed)
    subprocess.run(["scancel", str(job.id)], check=True)
    code, _, stderr = finish(cancelled)
    assert code == 3
    assert f"Slurm job {job.id} ended CANCELLED" in stderr
    assert "with 1 launch left; the same command submits the rest" in stderr

    stopped = start(completed.parent, "--launches", "2")
    wait_until(lambda: runs_after(job.id, completed))
    again = SlurmJob(completed)
    wait_until(lambda: again.log.exists() and "1 of 2 launches are done already" in again.log.read_text())
    stopped.send_signal(signal.SIGINT)
    code, _, stderr = finish(stopped)
    assert code == 130
    assert f"cancelled Slurm job {again.id}" in stderr
    assert again.state().state == "CANCELLED"


def test_ctrl_c_while_the_job_is_submitted_cancels_it(completed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm has the job, and its id is not known here yet."""
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/sh\nid=$({shutil.which("sbatch")} "$@"); kill -INT $PPID; sleep 1; echo "$id"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    set_partition("DOWN")
    try:
        code, _, stderr = finish(start(completed.parent, "--launches", "3"))
        jobs = subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True, text=True, check=True).stdout
    finally:
        set_partition("UP")
    assert code == 130
    assert f"cancelled Slurm job {SlurmJob(completed).id}" in stderr
    assert jobs.split() == []


def test_the_end_of_a_connection_leaves_the_job_which_the_same_command_follows_again(completed: Path) -> None:
    set_partition("DOWN")
    followers = {}
    try:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            process = start(completed.parent, "--launches", "2")
            assert process.stdout is not None
            lines = list(takewhile(lambda line: "PENDING" not in line, process.stdout))
            process.send_signal(number)
            code, _, stderr = finish(process)
            assert code == 130
            followers[number] = "".join(lines), stderr
    finally:
        set_partition("UP")
    job = SlurmJob(completed).id
    for number in (signal.SIGHUP, signal.SIGTERM):
        text = f"stopped following Slurm job {job} on {number.name}: the job goes on; the same command follows it again"
        assert f"{text}; scancel {job} cancels it" in followers[number][1]
    for number in (signal.SIGTERM, signal.SIGINT):
        assert f"Slurm job {job} of this folder is not done: following it instead of submitting another" in followers[number][0]
    assert f"cancelled Slurm job {job}" in followers[signal.SIGINT][1]


def test_what_slurm_refuses_is_one_line(folder: Path) -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "benchbox.cli.app", "run", "jobs.yaml", "--out", "refused", "--launcher", "slurm"]
    done = subprocess.run(
        [*command, "--slurm", "partition=nowhere"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("error: sbatch: ")
    assert "nvalid partition" in line


def test_a_training_runs_as_a_job_on_two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes are network namespaces, each with a slurmd."""
    monkeypatch.delenv("SLURM_CONF")
    command = [sys.executable, "-m", "benchbox.cli.app", "train", "train.yaml", "--out", "two", "--launcher", "slurm"]
    with two_hosts() as hosts, private_slurm(hosts) as variables:
        words = [*command, "--slurm", "nodes=2", "--set", "backend=ddp,world_size=2"]
        code = hosts[0].start(words, log=folder / "two.log", variables=variables, folder=folder).wait(LIMIT_S)
    text = (folder / "two.log").read_text()
    assert code == 0, text
    assert f"node 1 joined node 0 ({hosts[0].name})" in text
    assert "step 3/3" in text
    assert (folder / "two/checkpoints/step-00000003").is_dir()
    assert [path.name for path in sorted(folder.glob("two/launch/torchrun*.log"))] == ["torchrun-node1.log", "torchrun.log"]


@pytest.mark.exhaustive
def test_a_training_that_slurm_puts_back_into_the_queue_goes_on_from_its_checkpoint(folder: Path) -> None:
    command = [sys.executable, "-m", "benchbox.cli.app", "train", "train.yaml", "--out", "requeued", "--launcher", "slurm"]
    words = ["--set", "steps=300", "--set", "checkpoint.every=10"]
    process = subprocess.Popen([*command, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    out = folder / "requeued"
    wait_until(lambda: bool(list(out.glob("checkpoints/step-*"))))
    job = str(SlurmJob(out).id)
    subprocess.run(["scontrol", "requeue", job], check=True)
    wait_until(lambda: SlurmJob(out).state().state == "PENDING")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)  # it would wait for two minutes
    code, stdout, _ = finish(process)
    assert code == 0, stdout
    assert re.search(r"resuming after step [1-9]", stdout), stdout
    assert [row["step"] for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())] == list(range(300))


@pytest.mark.exhaustive
def test_a_training_stops_with_a_checkpoint_at_the_signal_that_slurm_sends_before_the_end_of_its_time(folder: Path) -> None:
    command = [sys.executable, "-m", "benchbox.cli.app", "train", "train.yaml", "--out", "signalled", "--launcher", "slurm"]
    words = ["--slurm", "time=2,signal=USR1@60,exclusive", "--set", "steps=1000000", "--set", "checkpoint.every=1000000"]
    done = subprocess.run([*command, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "SIGUSR1: the training stops after this step with a checkpoint" in done.stdout, done.stdout[-2000:]
    assert re.search(r"Slurm job [0-9]+ ended FAILED \(NonZeroExitCode\); --resume submits the rest", done.stderr), done.stderr
    assert list((folder / "signalled/checkpoints").glob("step-*"))
