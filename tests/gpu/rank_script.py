"""A rank that is alone in its process group: collectives, then steps of a few backends, without the refusal of one rank.

`python -m torch.distributed.run --nproc-per-node 1 rank_script.py JOB.json`, the job being `{"cells": [...], "steps": n, "out":
folder}`. Writes `collectives.json`, and for each cell `<index>.json`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from benchbox.backends.base import StepShape
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.registry.backends import backend_info
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import Session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    out = Path(job["out"])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    (out / "collectives.json").write_text(json.dumps(run_collectives(device)))
    for index, values in enumerate(job["cells"]):
        (out / f"{index}.json").write_text(json.dumps(run_cell(Cell.from_dict(values), job["steps"])))
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._shared_state.clear()
    dist.barrier()
    dist.destroy_process_group()


def run_collectives(device: torch.device) -> dict[str, Any]:
    """Return the results of the collectives that backends use, on the numbers 0 to 7."""
    results: dict[str, Any] = {"backend": dist.get_backend()}
    for dtype in (torch.float32, torch.bfloat16):
        numbers = torch.arange(8, device=device, dtype=dtype)
        reduced, gathered, scattered, sent = numbers.clone(), *(torch.empty_like(numbers) for _ in range(2)), numbers.clone()
        dist.all_reduce(reduced)
        dist.all_gather_into_tensor(gathered, numbers)
        dist.reduce_scatter_tensor(scattered, numbers)
        dist.broadcast(sent, src=0)
        results[str(dtype)] = [tensor.tolist() for tensor in (reduced, gathered, scattered, sent)]
    return results


def run_cell(cell: Cell, steps: int) -> dict[str, Any]:
    """Train some steps as `build_session` would prepare them; it refuses to shard over one rank."""
    policy = build_cell_policy(cell)
    backend = backend_info(cell.backend).load()()
    os.environ.update(backend.environment())
    with closing(open_cell_data(cell, policy, rank=0)) as stream:
        policy.load_statistics(list(stream.statistics))
        shape = StepShape(batch=cell.batch, accumulation=cell.accumulation, max_grad_norm=cell.optim.max_grad_norm)
        backend.prepare(policy, recipe_by_name(cell.recipe), cell.optim, shape)
        session = Session(backend, accumulation=cell.accumulation)
        losses = [float(session.step(stream).loss) for _ in range(steps)]
        collectives = CollectiveCounter()
        with OperationDispatchMode(collectives):
            session.step(stream)
    return {
        "loss": losses,
        "model_class": backend.observe().model_class,
        "optimizer_chain": backend.observe().optimizer_chain,
        "process_group": dist.get_backend(),
        "collectives": {name: totals["count"] for name, totals in collectives.counts.items()},
        "device": {parameter.device.type for parameter in session.model.parameters()}.pop(),
    }


if __name__ == "__main__":
    main(sys.argv[1])
