"""The worker, which at its end also writes the timeouts of its process groups, `timeouts-rank<r>.json`, in seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchbox.worker.rank import run_rank

destroy_process_group = dist.destroy_process_group


def write_timeouts_and_destroy() -> None:
    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    timeouts = [backend.options._timeout.total_seconds() for backend in backends]
    path = Path(sys.argv[1]).with_name(f"timeouts-rank{dist.get_rank()}.json")
    path.write_text(json.dumps(timeouts))
    destroy_process_group()


if __name__ == "__main__":
    dist.destroy_process_group = write_timeouts_and_destroy
    run_rank(sys.argv[1])
