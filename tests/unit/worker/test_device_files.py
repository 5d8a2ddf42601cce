"""A fork server counts GPUs without NVML, which starts a thread: this one does, and knows of two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchbox.worker import device_files

if TYPE_CHECKING:
    from pathlib import Path

requires_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
NVML = """
#include <pthread.h>
#include <unistd.h>
static void *idle(void *unused) { for (;;) pause(); return 0; }
static int start(void) { pthread_t thread; return pthread_create(&thread, 0, idle, 0); }
int nvmlInit(void) { return start(); }
int nvmlInit_v2(void) { return start(); }
int nvmlInitWithFlags(unsigned flags) { return start(); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
"""
SCRIPT = """
import json, os, sys
from pathlib import Path
import pynvml, torch
from benchbox.worker import device_files

device_files.DEVICES = Path(sys.argv[1])
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
with device_files.counting_by_files():
    count = torch.cuda._device_count_nvml()
    counts = {}
    for visible in ("", "0,2", "1,7,0", "GPU-a,GPU-b", "MIG-a"):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        counts[visible] = torch.cuda._device_count_nvml()
    del os.environ["CUDA_VISIBLE_DEVICES"]
    pynvml.nvmlInit()
    started_inside = threads() - before
after = torch.cuda._device_count_nvml()
pynvml.nvmlInit()
started = threads() - before
print(json.dumps({"count": count, "counts": counts, "started_inside": started_inside, "after": after, "started": started}))
"""


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A folder with the device files of three GPUs, and others of their driver."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        (folder / name).touch()
    return folder


def test_gpus_are_counted_by_their_device_files(devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_files, "DEVICES", devices)
    assert device_files.count_device_files() == 3
    monkeypatch.setattr(device_files, "DEVICES", tmp_path / "absent")
    assert device_files.count_device_files() == 0


def run_with_nvml(script: str, folder: Path, devices: Path) -> str:
    """Return the output of a script beside that NVML; modules in the folder can be imported."""
    command = ["cc", "-shared", "-fPIC", "-pthread", "-o", folder / "libnvidia-ml.so.1", "-x", "c", "-"]
    subprocess.run(command, input=NVML, text=True, check=True)
    variables = {**os.environ, "LD_LIBRARY_PATH": str(folder), "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", script, str(devices)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@requires_compiler
def test_nvml_is_initialised_after_the_imports_and_not_during_them(devices: Path, tmp_path: Path) -> None:
    counts = {"": 0, "0,2": 2, "1,7,0": 1, "GPU-a,GPU-b": 2, "MIG-a": 1}
    result = json.loads(run_with_nvml(SCRIPT, tmp_path, devices))
    assert result == {"count": 3, "counts": counts, "started_inside": 0, "after": 2, "started": 2}


SERVER = """
import sys
from pathlib import Path
from benchbox.worker import device_files, preloading

device_files.DEVICES = Path(sys.argv[1])
preloading.preload(("torch", "initialising"))
print("initialising" in sys.modules)  # an import that fails leaves nothing there
"""


@requires_compiler
def test_a_server_imports_a_library_that_initialises_nvml(devices: Path, tmp_path: Path) -> None:
    """DeepSpeed is one. Initialised there, NVML would keep the server from starting."""
    (tmp_path / "initialising.py").write_text("import pynvml\npynvml.nvmlInit()\n")
    assert run_with_nvml(SERVER, tmp_path, devices).strip() == "True"


RANK = """
import os, sys, types
from pathlib import Path
from benchbox.worker import device_files, forked_group

device_files.DEVICES = Path(sys.argv[1])
if "deepspeed" in os.environ["LIBRARIES"]:
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")
forked_group._run_rank({"module": "reporting", "job_file": "", "ranks": 1, "folder": os.getcwd()}, 0, 1)
"""


@requires_compiler
@pytest.mark.parametrize(("libraries", "threads"), [("deepspeed", 2), ("", 1)])
def test_a_forked_rank_initialises_nvml_if_deepspeed_relies_on_it(
    devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: str, threads: int
) -> None:
    (tmp_path / "reporting.py").write_text("import os\nprint(len(os.listdir('/proc/self/task')))\n")
    monkeypatch.setenv("LIBRARIES", libraries)
    assert int(run_with_nvml(RANK, tmp_path, devices)) == threads
