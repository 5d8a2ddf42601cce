"""Print the memory of a process that loads a dataset, and of its workers.

Usage: `python -m tests.support.loading_memory DATASET BUFFER`.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing

import psutil
import torch

from benchbox.data.loading.loader import open_stream
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.spec.cell import DataSpec

BATCH, WORKERS = 8, 2
QUARTERS = 4
WARM_UP_EPOCHS = 2
IDLE_S = 0.5


def wait_until_idle(processes: list[psutil.Process]) -> None:
    """Wait until processes have used no CPU time for a while: workers whose queues are full."""
    used_s = None
    while used_s != (used_s := [sum(process.cpu_times()[:2]) for process in processes]):
        time.sleep(IDLE_S)


def memory_by_quarters(root: str, buffer: int) -> list[float]:
    """Return the MiB at the quarters of the third epoch, with pages that processes share counted once.

    Queues are full, there and at the quarters before: how many blocks wait in them otherwise depends on how fast the machine is
    at that moment. At some block of the second epoch each worker takes 40 MiB more, once in its life.
    """
    data = DataSpec(kind="lerobot", path=root, workers=WORKERS, buffer=buffer)
    with torch.device("meta"):
        spec = build_policy("pi05", "full", Axes(cams=2)).batch_spec()
    stream = open_stream(data, spec, order="episode_shuffle", batch=BATCH, accumulation=1, rank=0, world_size=1, seed=0)
    with closing(stream):
        assert stream.samples_per_epoch is not None
        quarter = stream.samples_per_epoch // BATCH // QUARTERS
        used_mib = []
        for step in range(1, (WARM_UP_EPOCHS + 1) * QUARTERS * quarter + 1):
            next(stream)
            if step % quarter:
                continue
            workers = psutil.Process().children(recursive=True)
            assert len(workers) == WORKERS, "the workers live over epochs"
            wait_until_idle(workers)
            if step > WARM_UP_EPOCHS * QUARTERS * quarter:
                used_mib.append(sum(process.memory_full_info().pss for process in (psutil.Process(), *workers)) / 2**20)
    return used_mib


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(memory_by_quarters(sys.argv[1], int(sys.argv[2]))))
