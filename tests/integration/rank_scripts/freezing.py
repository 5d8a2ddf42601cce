"""Runs cells that freeze: `freezing.py JOB.json`, the job being `{"cells": [cell, ...], "out": folder}`.

For each cell rank 0 writes `<index>.json`: the losses, what was observed, which parameters differ from the start, which had a
gradient or master in the last step, the dtypes they are stored in, and how many elements are here of Adam's first moment. It
takes three steps. Where there may be masters it takes five, of which the last three are observed, and every rank writes what
an observer saw as `<index>-facts-<rank>.json`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from benchbox.observer.facts import RankFacts  # noqa: TC001
from benchbox.observer.introspect.masters import declared_masters
from benchbox.observer.introspect.names import live_parameters
from benchbox.observer.introspect.wrappers import fsdp1_handles, optimizer_chain
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import Session, build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell
from tests.integration.rank_scripts.cells import forget, observed_steps
from tests.support.direct_construction import initial_parameters


def main(job_file: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    rank, out = int(os.environ["RANK"]), Path(job["out"])
    for index, values in enumerate(job["cells"]):
        result, facts = run(Cell.from_dict(values), rank)
        if facts is not None:
            (out / f"{index}-facts-{rank}.json").write_text(json.dumps(facts.to_dict()))
        if rank == 0:
            (out / f"{index}.json").write_text(json.dumps(result))
        forget()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(cell: Cell, rank: int) -> tuple[dict, RankFacts | None]:
    start = initial_parameters(cell)
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank)) as stream:
        session = build_session(cell, policy, stream.statistics)
        reader = WithGradient(session)
        masters = recipe_by_name(cell.recipe).masters
        step_results, facts = [session.step(stream, reader) for _ in range(2 if masters else 3)], None
        if masters:
            observed_results, facts = observed_steps(session, stream, cell, None, reader)
            step_results += observed_results
        after = whole_parameters(session.model)
        moments = session.backend.prepared.stepping.state.values()
        result = {
            "cell": cell.to_dict(),
            "observed": asdict(session.backend.observe()),
            "loss": [float(step_result.loss) for step_result in step_results],
            "grad_norm": [float(step_result.grad_norm) for step_result in step_results],
            "stored": {name: str(value.dtype).removeprefix("torch.") for name, value in after.items()},
            "moved": sorted(name for name, value in after.items() if not torch.equal(value, start[name].to(value.dtype))),
            "with_gradient": sorted(reader.names),
            "first_moment_elements": sum(local(state["exp_avg"]).numel() for state in moments),
        }
    return result, facts


class WithGradient:
    """An instrument that reads before a step which parameters have a gradient, a master, or a part in a flat one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._when = "optimizer" if "clip" in session.backend.fused_phases else "clip"
        self.names: set[str] = set()

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        if name == self._when:
            prepared = self._session.backend.prepared
            live = {id(parameter): name for name, parameter in live_parameters(prepared.model)}
            linked = declared_masters(optimizer_chain(prepared.optimizer), live)
            covered_ids = {covered for link in linked for _, covered in link.covers}
            flat = [handle.flat_param for handle in fsdp1_handles(prepared.model)]
            covered_ids |= {
                id(parameter)
                for flat_parameter in flat
                if flat_parameter.grad is not None
                for parameter in flat_parameter._params
            }
            covered_ids |= {id(parameter) for parameter in prepared.model.parameters() if parameter.grad is not None}
            self.names = {live[parameter_id] for parameter_id in covered_ids}
        return nullcontext()


def whole_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by its own name, whole on every rank."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: parameter.detach().clone() for name, parameter in live_parameters(model)}
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(model.parameters())):
            return {name: parameter.detach().clone() for name, parameter in live_parameters(model)}
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in live_parameters(model)
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main(sys.argv[1])
