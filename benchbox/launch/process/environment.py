"""The environment every group is started with. A variable the user has set is left alone."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Both names are read by torch's caching allocator, the newer one first.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def usable_cores() -> int:
    """Cores this process may run on, which in a container or a Slurm step are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_variables(user: Mapping[str, str]) -> dict[str, str]:
    """What ranks need to find and keep compiled extensions. Paths of this machine, so no part of a record."""
    found = {"PATH": tool_path(user)}
    if "TORCH_EXTENSIONS_DIR" not in user:
        # torch's own cache is shared by all environments, and building for one unbuilds for the others: DeepSpeed's
        # extension would be compiled anew at every change between two checkouts.
        cache = Path(user.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
        found["TORCH_EXTENSIONS_DIR"] = str(cache / "benchbox" / "torch_extensions" / environment)
    return found


def tool_path(user: Mapping[str, str]) -> str:
    """PATH with the folder of this interpreter in front.

    A virtual environment that is run without being activated has tools there that nobody would find otherwise: ninja, with
    which DeepSpeed compiles.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), user.get("PATH", os.defpath)])


def group_variables(ranks: int, user: Mapping[str, str]) -> dict[str, str]:
    """What to add to the user's environment for a group of that many ranks on this machine.

    Threads are shared out so that ranks do not compete for cores. Expandable segments keep the caching allocator from
    fragmenting when cells of different shapes are compared by their reserved memory.
    """
    added: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in user:
        added["OMP_NUM_THREADS"] = str(max(1, usable_cores() // ranks))
    if not any(name in user for name in _ALLOCATOR_VARIABLES):
        added["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return added
