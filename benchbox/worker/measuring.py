"""The `measure` job of a rank: warm up, measure, then look closely at one more step, and write down what was seen."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchbox.audit.record import facts_file
from benchbox.audit.subjects.session import witness_session
from benchbox.errors import NonFiniteError
from benchbox.measure.environment import environment
from benchbox.measure.memory import peak, reset_peak
from benchbox.measure.phases import PhaseClock, Together
from benchbox.measure.probe import probe
from benchbox.registry.recipes import RECIPES
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data, policy_on_paper
from benchbox.spec.cell import Cell, MeasureSpec
from benchbox.store.files import write_json
from benchbox.theory.flops import summed, training_cost
from benchbox.worker.expected import check_backend, check_step
from benchbox.worker.reporting import Reporter

if TYPE_CHECKING:
    from benchbox.measure.phases import Position
    from benchbox.registry.contracts import Batch, Policy
    from benchbox.session import StepResult
    from benchbox.store.events import EventWriter


def measure(job: dict[str, Any], rank: int, position: Position, events: EventWriter) -> None:
    """Write `facts-rank<r>.json`, what the audit judges, and `rank<r>.json`.

    Raises:
        MismatchError: what runs is not what was requested.
        NonFiniteError: a loss or gradient norm is not finite.
    """
    cell, spec = Cell.from_dict(job["cell"]), MeasureSpec(**job["measure"])
    report = Reporter(position, events)
    report.stage("build")
    policy_dirs = [Path(each) for each in job["policy_dirs"]]
    on_paper, policy = policy_on_paper(cell, policy_dirs), build_cell_policy(cell, policy_dirs)
    units = policy.layer_units()
    with closing(open_cell_data(cell, policy, rank)) as stream:
        report.stage("prepare")
        session = build_session(cell, policy, stream.statistics)
        observed = session.backend.observe()
        check_backend(cell, observed)
        device = session.device

        report.stage("warmup", spec.warmup_steps)
        taken = [_reported(session.step(stream, position), report) for _ in range(spec.warmup_steps)]
        _meet(device)
        reset_peak(device)

        report.stage("measure", spec.steps)
        clock = PhaseClock(device)
        instruments = Together(clock, position)
        measured = [_reported(session.step(stream, instruments), report) for _ in range(spec.steps)]
        times = clock.drain()
        memory = peak(device)
        series = _series([*taken, *measured])

        report.stage("probe")
        facts = witness_session(session, stream, RECIPES[cell.recipe], position)
        seen = probe(session, stream, units, device, position)
        check_step(cell, kernel=seen.attention_kernel, checkpointed=seen.checkpointed_modules, stepped=facts.stepped)

        report.stage("write")
        result = {
            "rank": rank,
            "world_size": cell.world_size,
            "observed": {
                **observed.to_dict(),
                "attention_kernel": seen.attention_kernel,
                "checkpointed_modules": seen.checkpointed_modules,
                "weights": None if session.loaded is None else session.loaded.to_dict(),
            },
            "step_time_s": times.step_s,
            "phases_s": times.phases_s,
            "fused_phases": session.backend.fused_phases,
            "samples": sum(result.samples for result in measured),
            **series,
            "memory": memory or seen.memory,
            "collectives": seen.collectives,
            "flops": {**seen.flops, "per_tower": _by_formula(on_paper, seen.micro_batches, device)},
            **seen.utilisation(times.step_s),
            "environment": environment(),
            "config": cell.to_dict(),
        }
        write_json(Path(job["out"]) / facts_file(rank), facts.to_dict())
        write_json(Path(job["out"]) / f"rank{rank}.json", result)


def _by_formula(policy: Policy, micro_batches: list[Batch], device: torch.device) -> dict[str, dict[str, int]] | None:
    """What a step of these micro-batches costs on this rank, tower by tower; None for a policy that does not say.

    Asked of a policy that no backend has sharded: there the sizes of layers can be seen. Every rank asks.
    """
    if not hasattr(policy, "work"):
        return None
    batches = ({name: tensor.to(device) for name, tensor in batch.items()} for batch in micro_batches)
    costs = summed(training_cost(policy.work(batch)) for batch in batches)
    return {tower: asdict(cost) for tower, cost in costs.items()}


def _reported(result: StepResult, report: Reporter) -> StepResult:
    report.said()
    return result


def _meet(device: torch.device) -> None:
    """Begin measuring together, with nothing of the warm-up still running."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def _series(results: list[StepResult]) -> dict[str, list[float]]:
    """Losses and gradient norms of all steps, read only now: reading one inside the loop would wait for the device."""
    series = {
        "loss": [float(result.loss) for result in results],
        "grad_norm": [float(result.grad_norm) for result in results],
    }
    for name, values in series.items():
        for step, value in enumerate(values):
            if not math.isfinite(value):
                raise NonFiniteError(f"step {step}: {name} is {value}")
    return series
