"""The device of a rank, before it joins others."""

from __future__ import annotations

import os

import torch

from benchbox.errors import UnsupportedError


def rank_device() -> torch.device:
    """Return the GPU of this rank, or the CPU where there is none.

    Raises:
        UnsupportedError: there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= devices:
        raise UnsupportedError(
            f"rank {index} has no GPU of its own: this machine shows {devices}; lower world_size, or --ranks of doctor, "
            "or hide them by CUDA_VISIBLE_DEVICES= to run on CPU ranks"
        )
    return torch.device("cuda", index)
