"""Trains cells from checkpoints and to checkpoints, one after another in one process group.

`resumes.py JOB.json`, the job being `{"parts": [{"cell": ..., "restore": folder or null, "steps": n, "folder": ..., "every": k,
"section": {...}, "averages": bool, "spikes": [step, ...]}, ...]}`. A part starts anew or from the checkpoint `restore`, trains
to step `steps`, and saves into `folder` every `every` steps. Actions of the steps `spikes` are 1000 times as large. Rank 0
writes `<folder>/rows.json`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from benchbox.observer.introspect.names import live_parameters
from benchbox.observer.introspect.tensors import local_shard
from benchbox.optim import MasterWeightOptimizer
from benchbox.session.build import build_cell_policy, build_session, open_cell_data
from benchbox.spec.cell import Cell
from benchbox.spec.train import CheckpointSection
from benchbox.store.checkpoints import checkpoint_steps
from benchbox.trainer.checkpoint import CheckpointManager

if TYPE_CHECKING:
    from benchbox.backends.base import Backend
    from benchbox.session import Session


def main(job_file: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for part in json.loads(Path(job_file).read_text())["parts"]:
        run(part, rank)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._shared_state.clear()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Averages:
    """Tensors like those that a rank steps, each the weight and 1, in place of averages of the weights."""

    def __init__(self, session: Session) -> None:
        self._backend = session.backend
        self.update(0)

    def update(self, updates: int) -> None:
        self.tensors = {name: tensor.detach().float() + 1 for name, tensor in stepped_tensors(self._backend).items()}
        self.updates = updates


def stepped_tensors(backend: Backend) -> dict[str, torch.Tensor]:
    parameters = {name: p for name, p in live_parameters(backend.prepared.model) if p.requires_grad}
    if isinstance(backend.prepared.stepping, MasterWeightOptimizer):
        names = {id(parameter): name for name, parameter in parameters.items()}
        stepped = [parameter for group in backend.prepared.stepping.param_groups for parameter in group["params"]]
        return {names[id(p)]: master for p, master in zip(stepped, backend.prepared.stepping.masters, strict=True)}
    if backend.name == "zero3":
        from deepspeed.utils import safe_get_local_fp32_param

        return {name: safe_get_local_fp32_param(parameter) for name, parameter in parameters.items()}
    if backend.name.startswith("zero"):
        return {name: p._hp_mapping.hp_fragment for name, p in parameters.items() if p._hp_mapping is not None}
    return {name: local_shard(parameter.detach()) for name, parameter in parameters.items()}


def run(part: dict, rank: int) -> None:
    cell, folder = Cell.from_dict(part["cell"]), Path(part["folder"])
    restored = None if part["restore"] is None else Path(part["restore"])
    start = 0 if restored is None else checkpoint_steps(restored)
    section = CheckpointSection(every=part["every"], keep=10, **part["section"])
    policy = build_cell_policy(cell)
    rows = []
    with (
        CheckpointManager(folder, cell, section) as checkpoints,
        closing(open_cell_data(cell, policy, rank, start_step=start)) as stream,
    ):
        session = build_session(cell, policy, stream.statistics)
        if part["averages"]:
            session.averages = Averages(session)
        batches = iter(stream)
        if restored is not None:
            batches = session.backend.rehearse(batches)
            checkpoints.restore(session, restored)
            if part["steps"] == start:
                checkpoints.save(session, start)
        for step in range(start, part["steps"]):
            batch = next(batches)
            if step in part["spikes"]:
                batch["action"] = batch["action"] * 1e3
            result = session.step([batch])
            loss, norm = float(result.loss), float(result.grad_norm)
            rows.append({"loss": loss, "grad_norm": norm, "lr": result.lr, "skipped": result.skipped})
            if part["averages"]:
                session.averages.update(step + 1)
            if checkpoints.is_due(step + 1, last=step + 1 == part["steps"]):
                with torch.no_grad():
                    session.model(batch)  # a validation, after which FSDP2 leaves the root gathered
                checkpoints.save(session, step + 1)
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
