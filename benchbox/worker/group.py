"""The group of ranks: the timeout of its collectives, and joining it to measure the machine without a session."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchbox.backends.device import rank_device
from benchbox.registry.phases import GROUP_TIMEOUT_S


def leave_hangs_to_launcher() -> None:
    """Give every process group that this rank will create a timeout that no limit of the launcher reaches.

    These are torch's defaults, because accelerate, DeepSpeed and device meshes create groups with no other.
    """
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined] # torch does not export it


def join_group() -> tuple[torch.device, str]:
    """Join the group of ranks, and return the device of this rank and the backend of torch.distributed.

    Raises:
        UnsupportedError: there are fewer GPUs than ranks.
    """
    device = rank_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    return device, backend
