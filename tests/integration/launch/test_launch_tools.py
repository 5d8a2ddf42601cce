import signal
import sys
import time
from pathlib import Path

import pytest

from benchbox.launch.job import Job
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.processes import find_processes

pytestmark = pytest.mark.ranks


def test_ranks_find_ninja_beside_their_interpreter_though_the_environment_is_not_activated(tmp_path: Path, monkeypatch) -> None:
    """One poll of a group under torchrun waits for its end."""
    (tmp_path / "look.py").write_text(
        "import json, os, pathlib, shutil, sys\n"
        "out = json.loads(pathlib.Path(sys.argv[1]).read_text())['out']\n"
        "pathlib.Path(out, 'ninja').write_text(str(shutil.which('ninja')))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    job = Job(config={"kind": "look"}, ranks=1, folder=tmp_path / "job", timeout_s=60.0, hang_after_s=60.0)
    job.prepare()
    group = TorchrunLauncher(worker_module="look").start(job)
    assert group.poll(60.0) == 0, job.group_log.read_text()
    group.end()
    assert (job.folder / "ninja").read_text() == str(Path(sys.executable).parent / "ninja"), job.group_log.read_text()


def test_torchrun_survives_the_signals_that_ask_a_training_to_stop(tmp_path: Path, monkeypatch) -> None:
    """A batch system may send one to every process of a job; ranks that train wait for it."""
    (tmp_path / "wait.py").write_text(
        "import json, pathlib, sys, time\n"
        "out = pathlib.Path(json.loads(pathlib.Path(sys.argv[1]).read_text())['out'])\n"
        "(out / 'started').touch()\n"
        "while not (out / 'go').exists():\n"
        "    time.sleep(0.05)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = Job(config={"kind": "look"}, ranks=1, folder=tmp_path / "job", timeout_s=60.0, hang_after_s=60.0)
    job.prepare()
    group = TorchrunLauncher(worker_module="wait").start(job)
    deadline = time.monotonic() + 120
    while not (job.folder / "started").exists():
        assert time.monotonic() < deadline, job.group_log.read_text()
        time.sleep(0.05)
    for process in (process for process in find_processes(job.job_id) if "torchrun" in " ".join(process.cmdline())):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
    (job.folder / "go").touch()
    assert group.poll(60.0) == 0, job.group_log.read_text()
    group.end()
