"""Runs several cells one after another in one process group, so that a test pays for starting ranks once.

`python -m torch.distributed.run --nproc_per_node N rank_side.py JOB.json`, the job being
`{"cells": [...], "steps": n, "policy_dirs": [...], "out": path}`. Rank 0 writes, for each cell, the losses and gradient norms of
every step, and what was observed.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from benchbox.data.loader import open_stream
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy
from benchbox.spec.cell import Cell


def main(job_file: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    results = []
    for values in job["cells"]:
        cell = Cell.from_dict(values)
        results.append(run(cell, job["steps"], [Path(folder) for folder in job.get("policy_dirs", [])]))
        from benchbox.backends.accelerators import forget

        forget()
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(cell: Cell, steps: int, policy_dirs: list[Path]) -> dict:
    policy = build_cell_policy(cell, policy_dirs)
    rank = int(os.environ.get("RANK", "0"))
    with closing(
        open_stream(
            cell.data,
            policy.batch_spec(),
            batch=cell.batch,
            accumulation=cell.accumulation,
            rank=rank,
            world_size=cell.world_size,
            seed=cell.seed,
        )
    ) as stream:
        session = build_session(cell, policy, stream.statistics)
        observed = session.backend.observe().to_dict()
        batches = iter(stream)
        taken = [session.step(batches) for _ in range(steps)]
    return {
        "cell": cell.to_dict(),
        "observed": observed,
        "loss": [float(result.loss) for result in taken],
        "grad_norm": [float(result.grad_norm) for result in taken],
    }


if __name__ == "__main__":
    main(sys.argv[1])
