"""Environment variables of a group of ranks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.process import environment
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.environment import (
    fork_server_variables,
    has_cuda_device,
    host_variables,
    import_environment,
    rank_environment,
)
from benchbox.measure.control_groups import usable_cores

if TYPE_CHECKING:
    from pathlib import Path


def test_variables_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0))
    assert TorchrunLauncher().variables(2) == {
        "OMP_NUM_THREADS": str(max(1, cores // 2)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert TorchrunLauncher().variables(10_000)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert TorchrunLauncher().variables(2) == {}


def test_cores_that_a_container_does_not_give_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 6 of 64."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores() == 6
    assert TorchrunLauncher().variables(2)["OMP_NUM_THREADS"] == "3"


def test_a_fork_server_counts_devices_without_the_driver_of_cuda() -> None:
    """Its ranks could not use a driver that it has initialised."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    assert fork_server_variables({})[name] == "1"
    assert name not in fork_server_variables({name: "0"}), "the user's is left alone"


def test_an_empty_number_of_threads_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert TorchrunLauncher().variables(10_000)["OMP_NUM_THREADS"] == "1"


def test_compiled_extensions_are_kept_apart_by_environment_unless_the_user_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two environments that shared a cache would compile for each other's headers by turns."""
    here = host_variables({"XDG_CACHE_HOME": "/cache"})["TORCH_EXTENSIONS_DIR"]
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    there = host_variables({"XDG_CACHE_HOME": "/cache"})["TORCH_EXTENSIONS_DIR"]
    assert here.startswith("/cache/benchbox/")
    assert here != there
    assert "TORCH_EXTENSIONS_DIR" not in host_variables({"TORCH_EXTENSIONS_DIR": "/mine"})


def test_tools_of_this_interpreter_come_before_those_of_another_environment() -> None:
    folder = os.path.dirname(sys.executable)  # noqa: PTH120
    assert host_variables({"PATH": "/another/bin"})["PATH"] == f"{folder}{os.pathsep}/another/bin"


def test_a_server_serves_processes_that_differ_in_variables_of_shells_and_commands_only():
    imported = {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "+dynamo"}
    assert import_environment(imported | {"TERM": "dumb", "BENCHBOX_ESTIMATE": "false"}) == imported


@pytest.mark.parametrize(
    ("visible", "is_seen"),
    [
        (None, True),
        ("0,1", True),
        (" 2", True),
        ("GPU-5c3b3d6e", True),
        ("MIG-5c3b3d6e", True),
        ("", False),
        ("-1", False),
        ("-1,0", False),
        ("NoDevFiles", False),
    ],
)
def test_devices_that_the_user_hides_are_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, is_seen: bool
) -> None:
    """Else DeepSpeed would be imported for CUDA in a fork server whose ranks train on the CPU."""
    control_file = tmp_path / "nvidiactl"
    monkeypatch.setattr(environment, "_CONTROL_FILE", control_file)
    monkeypatch.setattr(environment, "_OTHER_GPU_FILES", ())
    user = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert not has_cuda_device(user)
    control_file.touch()
    assert has_cuda_device(user) == is_seen
    assert fork_server_variables(user)["DS_ACCELERATOR"] == ("cuda" if is_seen else "cpu")


def test_deepspeed_asks_torch_where_a_gpu_is_not_nvidias_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WSL2 and ROCm have no /dev/nvidiactl. Torch may see CUDA there, and DeepSpeed must not be told otherwise."""
    gpu_file = tmp_path / "dxg"
    monkeypatch.setattr(environment, "_CONTROL_FILE", tmp_path / "nvidiactl")
    monkeypatch.setattr(environment, "_OTHER_GPU_FILES", (gpu_file,))
    assert fork_server_variables({})["DS_ACCELERATOR"] == "cpu"
    gpu_file.touch()
    assert "DS_ACCELERATOR" not in fork_server_variables({})
    (tmp_path / "nvidiactl").touch()
    assert fork_server_variables({})["DS_ACCELERATOR"] == "cuda"


def test_variables_of_accelerate_launch_are_not_those_of_ranks():
    """accelerate would take from them what a backend does not pass."""
    user = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "FSDP_VERSION": "1", "PARALLELISM_CONFIG_TP_SIZE": "2", "LANG": "C"}
    variables = rank_environment(user, {"OMP_NUM_THREADS": "2"})
    assert variables.keys() == {"LANG", "OMP_NUM_THREADS", "PATH", "TORCH_EXTENSIONS_DIR"}
