"""The group of ranks of a job that measures the machine and trains nothing."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def join_group() -> tuple[torch.device, str]:
    """Join the group of ranks, and return the device of this rank and the backend of torch.distributed."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    return device, backend
