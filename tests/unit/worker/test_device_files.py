"""A fork server counts GPUs without NVML, which starts a thread: this one does, and knows of two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchbox.worker.device_files import count_device_files

if TYPE_CHECKING:
    from pathlib import Path

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
from benchbox.worker.device_files import counting_by_files

threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
with counting_by_files(Path(sys.argv[1])):
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


def test_gpus_are_counted_by_their_device_files(devices: Path, tmp_path: Path) -> None:
    assert count_device_files(devices) == 3
    assert count_device_files(tmp_path / "absent") == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_nvml_is_initialised_after_the_imports_and_not_during_them(devices: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-pthread", "-o", tmp_path / "libnvidia-ml.so.1", "-x", "c", "-"],
        input=NVML,
        text=True,
        check=True,
    )
    variables = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(devices)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = {"": 0, "0,2": 2, "1,7,0": 1, "GPU-a,GPU-b": 2, "MIG-a": 1}
    assert json.loads(done.stdout) == {"count": 3, "counts": counts, "started_inside": 0, "after": 2, "started": 2}
