from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest
import torch

import benchbox
from benchbox.measure.environment import environment, machine_slug
from benchbox.registry.launch_environment import RankEnvironment
from benchbox.store.json_types import type_problem


@pytest.fixture
def record():
    return environment()


def test_the_environment_is_plain_json_and_names_the_versions(record):
    assert json.loads(json.dumps(record)) == record
    assert record["torch"] == torch.__version__
    assert record["benchbox"] == benchbox.__version__
    assert record["threads"] == torch.get_num_threads()


def test_the_environment_has_the_declared_keys_and_types(record):
    assert type_problem(record, RankEnvironment) is None
    assert record.keys() == RankEnvironment.__annotations__.keys() - {"node", "host"}, "those of several nodes"


def test_the_environment_names_no_host_and_no_folder(record):
    text = json.dumps(record)
    assert f'"{socket.gethostname()}"' not in text
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    assert f'"{getpass.getuser()}"' not in text


def test_an_unset_variable_is_null_and_a_set_one_is_kept(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert environment()["variables"]["PYTORCH_CUDA_ALLOC_CONF"] is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert environment()["variables"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_a_machine_is_called_by_its_devices_or_by_its_processor():
    assert machine_slug(["NVIDIA H200"] * 8, "some CPU", 64, "AVX2") == "8x-nvidia-h200"
    assert machine_slug([], "Intel(R) Xeon(R) @ 2.10GHz", 2, "AVX512") == "intel-xeon-2-10ghz-2-cores"


def test_a_processor_without_avx512_is_another_machine_than_one_of_the_same_name_with_it():
    assert machine_slug([], "AMD EPYC", 2, "AVX2") == "amd-epyc-avx2-2-cores"
    assert machine_slug([], "AMD EPYC", 2, "AVX512") == machine_slug([], "AMD EPYC", 2, "DEFAULT") == "amd-epyc-2-cores"


def test_instructions_are_those_that_torch_computes_with_unless_a_gpu_does(monkeypatch):
    assert environment()["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr("benchbox.measure.environment._devices", lambda: ["NVIDIA H200"])
    assert environment()["cpu_capability"] is None


def test_variables_of_nccl_are_recorded_where_they_are_set_without_paths_and_host_names(monkeypatch):
    assert not [name for name in environment()["variables"] if name.startswith("NCCL_")]
    for name, value in {"NCCL_DEBUG": "INFO", "NCCL_TOPO_FILE": "/home/somebody/topology", "NCCL_HOSTID": "node7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    variables = environment()["variables"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert (variables["NCCL_DEBUG"], variables["NCCL_TOPO_FILE"], variables["NCCL_HOSTID"]) == ("INFO", "(set)", "(set)")


def test_variables_that_change_a_measurement_are_recorded_where_they_are_set(monkeypatch):
    """Else cells that were measured under unequal ones would be compared."""
    values = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "KMP_AFFINITY": "granularity=fine,compact,1,0",
        "MKL_NUM_THREADS": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "OMP_PROC_BIND": "true",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    assert not values.keys() & environment()["variables"].keys()
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LD_PRELOAD", "/opt/somebody/libmalloc.so")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/somebody")
    variables = environment()["variables"]
    assert values.items() <= variables.items()
    assert variables["LD_PRELOAD"] == "(set)"
    assert "TORCHINDUCTOR_CACHE_DIR" not in variables, "a compiled cell and one that is not have the same variables"


def test_settings_of_tf32_and_determinism_are_read_from_torch(record):
    before = record["numerics"]
    assert set(before) >= {"float32_matmul_precision", "matmul_tf32", "cudnn_tf32", "deterministic_algorithms"}
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    try:
        changed = environment()["numerics"]
    finally:
        torch.set_float32_matmul_precision(before["float32_matmul_precision"])
        torch.use_deterministic_algorithms(before["deterministic_algorithms"])
    assert (changed["float32_matmul_precision"], changed["matmul_tf32"], changed["deterministic_algorithms"]) == (
        "high",
        True,
        True,
    )
    assert environment()["numerics"] == before
