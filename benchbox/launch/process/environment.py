"""Environment variables of a group of ranks. A variable that the user has set is left unchanged, except of accelerate."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.measure.control_groups import usable_cores
from benchbox.registry.launch_environment import ACCELERATE_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping

# Both names are read by torch's caching allocator, the newer one first.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_CONTROL_FILE = Path("/dev/nvidiactl")
# GPUs of WSL2 and of AMD, which some builds of torch call CUDA devices and others do not use
_OTHER_GPU_FILES = (Path("/dev/dxg"), Path("/dev/kfd"))
# Beginning of a value of CUDA_VISIBLE_DEVICES that leaves any device: -1, nothing and Slurm's NoDevFiles hide all of them.
_NAMES_DEVICE = re.compile(r"\s*\+?\d|GPU-|MIG-")

_SHELL_VARIABLES = frozenset({"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "SHLVL", "TERM"})
_COMMAND_VARIABLES = frozenset({"BENCHBOX_ESTIMATE"})  # an option of commands, which no rank reads


def rank_environment(user: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of a process of ranks: the user's, those of this host, and `added`.

    Those of `accelerate launch` are left out: a shell or a job script may have them for another program, and accelerate would
    take settings of the ranks from them.
    """
    without_accelerate = {name: value for name, value in user.items() if not name.startswith(ACCELERATE_PREFIXES)}
    return {**without_accelerate, **host_variables(user), **added}


def host_variables(user: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which ranks find and cache compiled extensions.

    They hold paths of this machine, so they are not recorded.
    """
    variables = {"PATH": tool_path(user)}
    if "TORCH_EXTENSIONS_DIR" not in user:
        # torch's default cache is shared by all environments, and a build for one replaces that for the others: DeepSpeed's
        # extension would be compiled again at every change between two virtual environments.
        cache = Path(user.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
        variables["TORCH_EXTENSIONS_DIR"] = str(cache / "benchbox" / "torch_extensions" / environment)
    return variables


def tool_path(user: Mapping[str, str]) -> str:
    """Return PATH with the folder of this interpreter in front.

    An interpreter of a virtual environment that is not activated would not find the tools in that folder otherwise, such as
    ninja, which DeepSpeed needs to compile.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), user.get("PATH", os.defpath)])


def has_cuda_device(user: Mapping[str, str]) -> bool:
    """Return whether ranks with these variables see an NVIDIA device, without importing torch."""
    return _CONTROL_FILE.exists() and _NAMES_DEVICE.match(user.get("CUDA_VISIBLE_DEVICES", "0")) is not None


def fork_server_variables(user: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep libraries from initialising CUDA when a fork server imports them.

    torch then counts devices without the CUDA driver (see `benchbox.worker.device_files`), and DeepSpeed does not search for an
    accelerator, except where only torch knows whether it has one.
    """
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if has_cuda_device(user):
        variables["DS_ACCELERATOR"] = "cuda"
    elif not any(path.exists() for path in _OTHER_GPU_FILES):
        variables["DS_ACCELERATOR"] = "cpu"
    return {name: value for name, value in variables.items() if name not in user}


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change what libraries do when they are imported: all but those of shells, of test
    runners and of commands.

    Processes forked from one that imported with these variables differ in nothing from a new interpreter.
    """
    return {name: value for name, value in environment.items() if name not in _SHELL_VARIABLES | _COMMAND_VARIABLES}


def group_variables(ranks: int, user: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the user's environment for a group of `ranks` ranks on this machine.

    OMP_NUM_THREADS divides the cores among the ranks. Expandable segments keep the caching allocator from fragmenting when
    cells of different shapes are compared by their reserved memory.
    """
    added: dict[str, str] = {}
    if not user.get("OMP_NUM_THREADS"):  # accelerate cannot read an empty one
        added["OMP_NUM_THREADS"] = str(max(1, usable_cores() // ranks))
    if not any(name in user for name in _ALLOCATOR_VARIABLES):
        added["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return added
