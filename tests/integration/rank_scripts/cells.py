"""Runs several cells one after another in one process group, so that a test pays for starting ranks once.

`cells.py JOB.json`, the job being `{"cells": [{"cell": ..., "steps": n, "watch": ..., "act": bool}, ...], "out": folder}`.
For each cell rank 0 writes `<index>.json`: the losses and gradient norms of every step, and what was observed. If `watch`
is "collectives", those of the last step are counted, and its peak memory; if it is "facts", the last three steps are
observed, the collectives of the middle one are counted, and every rank writes `<index>-facts-<rank>.json`. With `act` the
wrapped policy acts once before it is trained, on every rank on the same samples. Beside it stands `<index>.pt`, for cells in
float32: the whole gradient of the first step by the name of each trained parameter, averaged over ranks and micro-steps,
before clipping.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from benchbox.audit.subjects.session import STEPS as OBSERVED_STEPS
from benchbox.audit.subjects.session import observe_session
from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.errors import UnsupportedError
from benchbox.measure.probe import StepProbe
from benchbox.observer.facts import RankFacts  # noqa: TC001
from benchbox.observer.introspect.names import unwrapped_name
from benchbox.registry.contracts import BatchSpec  # noqa: TC001
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import Session, build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell

if TYPE_CHECKING:
    from benchbox.measure.phases import Instrument
    from benchbox.session import StepResult


def main(job_file: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    rank = int(os.environ["RANK"])
    for index, planned in enumerate(job["cells"]):
        cell = Cell.from_dict(planned["cell"])
        result, gradient, facts = run(cell, planned["steps"], rank, watch=planned["watch"], act=planned["act"])
        if facts is not None:
            (Path(job["out"]) / f"{index}-facts-{rank}.json").write_text(json.dumps(facts.to_dict()))
        if rank == 0:
            if gradient:
                torch.save(gradient, Path(job["out"]) / f"{index}.pt")
            (Path(job["out"]) / f"{index}.json").write_text(json.dumps(result))
        forget()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(
    cell: Cell, steps: int, rank: int, *, watch: str | None, act: bool
) -> tuple[dict, dict[str, torch.Tensor], RankFacts | None]:
    policy = build_cell_policy(cell)
    spec = policy.batch_spec()
    with closing(open_cell_data(cell, policy, rank)) as stream:
        session = build_session(cell, policy, stream.statistics)
        observed = asdict(session.backend.observe())
        reader = GradientReader(session, wanted=cell.recipe == "fp32")
        actions = acted(session, spec) if act else None
        probe, facts = StepProbe(session.model, (), session.device), None
        collectives = probe.operations.collectives
        if watch == "facts":
            step_results = [session.step(stream, reader) for _ in range(steps - OBSERVED_STEPS)]
            observed_results, facts = observed_steps(session, stream, cell, probe, reader)
            step_results += observed_results
        else:
            step_results = [session.step(stream, reader) for _ in range(steps - 1)]
            with probe if watch else nullcontext():
                step_results.append(session.step(probe.record(stream), reader))
    result = {
        "cell": cell.to_dict(),
        "observed": observed,
        "collectives": collectives.counts,
        "peak_bytes": memory["allocated_peak_bytes"] if (memory := probe.result().memory) else None,
        # without what ranks tell one another in integers: which blocks of a prefix there are
        "reduced_bytes": sum(
            collective.bytes
            for collective in collectives.by_dtype()
            if "reduce" in collective.operation and "float" in collective.dtype
        ),
        "loss": [float(step_result.loss) for step_result in step_results],
        "grad_norm": [float(step_result.grad_norm) for step_result in step_results],
        "lr": [step_result.lr for step_result in step_results],
        "samples": step_results[0].samples,
        "actions": actions,
    }
    return result, reader.gradient, facts


def observed_steps(
    session: Session, stream: Any, cell: Cell, probe: StepProbe | None, instrument: Instrument
) -> tuple[list[StepResult], RankFacts]:
    """Take three steps under an observer and return their results, with the facts of this rank."""
    step_results: list[StepResult] = []
    step = session.step

    def noting(*arguments: Any) -> StepResult:
        step_results.append(step(*arguments))
        return step_results[-1]

    session.step = noting
    facts = observe_session(session, stream, recipe_by_name(cell.recipe), probe, instrument)
    session.step = step
    return step_results, facts


def acted(session: Session, spec: BatchSpec) -> list | None:
    """Return the actions of the policy, called through its wrapper; None if it does not act."""
    samples = SyntheticSamples(spec, seed=1)
    batch = default_collate([samples.sample(0, index) for index in range(2)])
    inputs = {field: batch[field] for field in spec.fields(acting=True)}
    session.model.eval()
    try:
        with torch.no_grad():
            return session.model(inputs, act=True).tolist()
    except UnsupportedError:
        return None
    finally:
        session.model.train()


def forget() -> None:
    """Drop accelerate's process-wide state, so that the next cell starts from nothing; the process group stays."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state.clear()


class GradientReader:
    """An instrument that reads the gradient of the first step between the last backward and whatever comes next."""

    def __init__(self, session: Session, *, wanted: bool) -> None:
        self._session = session
        self._wanted = wanted
        self._when = "optimizer" if "clip" in session.backend.fused_phases else "clip"
        self.gradient: dict[str, torch.Tensor] = {}

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        if name == self._when and self._wanted and not self.gradient:
            self.gradient = {unwrapped_name(name): value for name, value in whole_gradients(self._session.model)}
        return nullcontext()


def whole_gradients(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    if type(model).__name__ == "DeepSpeedEngine":
        from deepspeed.utils import safe_get_full_grad

        return [(name, safe_get_full_grad(parameter).clone()) for name, parameter in trained(model.module)]
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return [(name, parameter.grad.clone()) for name, parameter in trained(model)]
    return [
        (name, parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone())
        for name, parameter in trained(model)
    ]


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


if __name__ == "__main__":
    main(sys.argv[1])
