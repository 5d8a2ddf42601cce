"""Machine, software and settings of a measurement, without user name and paths; the host name only on several nodes."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from typing import TYPE_CHECKING

import psutil
import torch

import benchbox
from benchbox.measure.control_groups import usable_cores
from benchbox.measure.hardware import cpu_model, driver_version, physical_cores
from benchbox.registry.versions import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchbox.registry.launch_environment import GitState, RankEnvironment

# Environment variables that influence the measurement. Those of the first line are null where they are not set.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_RARE = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE", "LD_PRELOAD")
_RARE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUBLAS_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCHINDUCTOR_")
# torchrun sets the one for all its ranks, and where compiled code is kept changes no step.
_WITHOUT_INFLUENCE = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHINDUCTOR_CACHE_DIR")
_HOST_NAMES = ("NCCL_HOSTID", "NCCL_COMM_ID")


def environment(variables: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Return versions, machine, devices, threads, variables and git state of this process, as JSON values.

    Packages that are not installed, a missing driver and unset variables are null.

    Args:
        variables: those that the process began with. Libraries may have set more since: torch does so when it compiles.
    """
    cpu, devices, capability = cpu_model(), _devices(), torch.backends.cpu.get_cpu_capability()
    cores = physical_cores()
    return {
        "machine": machine_slug(devices, cpu, cores, capability),
        "benchbox": benchbox.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build, which the metadata of wheels of PyPI lack: 2.10.0+cu128
        "accelerate": installed_version("accelerate"),
        "deepspeed": installed_version("deepspeed"),
        "transformers": installed_version("transformers"),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu,
        # Of what computes: a hypervisor may give processors of several generations one name.
        "cpu_capability": None if devices else capability,
        "cores": cores,
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads": torch.get_num_threads(),
        "devices": devices,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "variables": _recorded_variables(variables),
        "numerics": _numerics(),
        "git": _git(),
        **_node(),
    }


def _node() -> RankEnvironment:
    """Return the node of this rank and its host where the launch has several, by the variables that torchrun sets."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return {}
    return {"node": int(os.environ["GROUP_RANK"]), "host": socket.gethostname()}


def machine_slug(devices: list[str], cpu: str, cores: int, capability: str) -> str:
    """Return a file name for this kind of machine: its devices, or without devices its processor and cores.

    An x86 processor without AVX-512 is called so: it has no instructions for bfloat16 either, and a hypervisor may give it the
    name of one that has.
    """
    if devices:
        kinds = sorted(set(devices))
        text = "-".join(f"{devices.count(kind)}x-{kind}" for kind in kinds)
    else:
        text = f"{cpu}{'-avx2' if capability == 'AVX2' else ''}-{cores}-cores"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:r|tm)\)", "", text.lower())).strip("-")


def _recorded_variables(variables: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that influence the measurement, paths and host names hidden. Unset rare ones are left out."""
    rare = {name for name in variables if name in _RARE or name.startswith(_RARE_PREFIXES)}
    names = (*_VARIABLES, *sorted(rare.difference(_VARIABLES, _WITHOUT_INFLUENCE)))
    values = {name: variables.get(name) for name in names}
    hidden = {name: "(set)" for name, value in values.items() if value and (os.sep in value or name in _HOST_NAMES)}
    return values | hidden


def _numerics() -> dict[str, bool | str]:
    """Return the settings of torch that change the arithmetic or the choice of kernels."""
    return {
        "float32_matmul_precision": _readable(torch.get_float32_matmul_precision),
        "matmul_tf32": _readable(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cudnn_tf32": _readable(lambda: torch.backends.cudnn.allow_tf32),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _readable(read: Callable[[], bool | str]) -> bool | str:
    """Return a setting of TF32; torch refuses to read one that a program has set through `fp32_precision` instead."""
    try:
        return read()
    except RuntimeError as error:
        return f"unknown: {str(error).splitlines()[0]}"


def _devices() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _git() -> GitState | None:
    """Return the commit of the working directory's repository, and whether tracked files differ; None outside a repository."""
    commit = _run_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _run_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changed) if changed is not None else None}


def _run_git(*arguments: str) -> str | None:
    try:
        process = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
