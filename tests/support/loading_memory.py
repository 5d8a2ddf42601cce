"""Print the memory of a process that loads a dataset, and of its workers.

Usage: `python -m tests.support.loading_memory DATASET BUFFER`.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing

import psutil
import torch

from benchbox.data.loading.loader import open_stream
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.spec.cell import DataSpec

BATCH, WORKERS = 8, 2
QUARTERS = 4


def memory_by_quarters(root: str, buffer: int) -> list[float]:
    """Return the MiB at the quarters of the second epoch, with pages that processes share counted once."""
    data = DataSpec(kind="lerobot", path=root, workers=WORKERS, buffer=buffer)
    with torch.device("meta"):
        spec = build_policy("pi05", "full", Axes(cams=2)).batch_spec()
    stream = open_stream(data, spec, order="episode_shuffle", batch=BATCH, accumulation=1, rank=0, world_size=1, seed=0)
    with closing(stream):
        assert stream.samples_per_epoch is not None
        quarter = stream.samples_per_epoch // BATCH // QUARTERS
        used_mib = []
        for step in range(1, 2 * QUARTERS * quarter + 1):
            next(stream)
            if step > QUARTERS * quarter and step % quarter == 0:
                processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
                assert len(processes) == 1 + WORKERS, "the workers live over epochs"
                used_mib.append(sum(process.memory_full_info().pss for process in processes) / 2**20)
    return used_mib


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(memory_by_quarters(sys.argv[1], int(sys.argv[2]))))
