"""Validates cells in one process group, so that a test pays for starting ranks once.

`validation.py JOB.json`, the job being `{"cells": [["passes" | "trainings", cell], ...], "passes": [{"seed", "batch",
"max_samples"}, ...], "out": folder}`. Rank 0 writes `<index of the cell>.json`.

With `passes` every cell is built once and validated with every pass: the seed of a pass chooses the validation episodes. The
rows of `validation.jsonl` are the result. With `trainings` every cell is trained twice, with validations and without, by a
policy that draws from all generators of the process. The result is what each rank has after each of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import default_collate

from benchbox.data.loading.loader import open_samples
from benchbox.data.order.validation import validation_batches
from benchbox.measure.phases import ProgressTracker
from benchbox.observer.introspect.tensors import local_shard
from benchbox.observer.introspect.wrappers import fsdp1_handles
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell
from benchbox.spec.validation_section import ValidationSection
from benchbox.trainer.evaluation import evaluating
from benchbox.trainer.loop import train
from benchbox.trainer.metrics import MetricsLog
from benchbox.trainer.stopping import never_stop
from benchbox.trainer.validation import Validation, ValidationPass
from tests.support.metrics_rows import without_measurements

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.session import Session

STEPS = 2


def main(job_file: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    rank, folder = int(os.environ["RANK"]), Path(job["out"])
    for index, (mode, values) in enumerate(job["cells"]):
        cell = Cell.from_dict(values)
        if mode == "passes":
            result: Any = run_passes(cell, job["passes"], rank, folder / f"{index}.jsonl")
        else:
            result = {}
            for name in ("with", "without"):
                result[name] = gathered(run_training(cell, rank, folder / f"{index}-{name}", validates=name == "with"))
                forget()
        forget()
        if rank == 0:
            (folder / f"{index}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run_passes(cell: Cell, passes: list[dict[str, Any]], rank: int, path: Path) -> list[dict[str, Any]]:
    """Return the rows of all passes; those of a single rank with the loss of all samples in one batch as `batch_loss`."""
    policy = build_cell_policy(cell)
    spec = policy.batch_spec()
    batch_losses = []
    with closing(open_cell_data(cell, policy, rank)) as stream:
        session = build_session(cell, policy, stream.statistics)
        for number, options in enumerate(passes):
            seed = options["seed"]
            section = ValidationSection(every=1, batch=options["batch"], max_samples=options["max_samples"])
            samples = open_samples(cell.data, spec, seed)
            one_pass = ValidationPass(section, replace(cell, seed=seed), samples, rank=rank, tracker=ProgressTracker())
            Validation(section, one_pass, path=path, start=number, is_writer=rank == 0).run(session, number)
            if cell.world_size > 1:
                continue
            (planned,) = validation_batches(
                samples.validation_segments(), batch=1000, rank=0, world_size=1, max_samples=options["max_samples"]
            )
            batch = default_collate([samples.sample(key.epoch, key.index) for key in planned.keys])
            with evaluating(session, 0):
                batch_losses.append(float(session.model(batch).total))
    lines = path.read_text().splitlines() if rank == 0 else []
    rows = [json.loads(line) for line in lines]
    return [row | {"batch_loss": loss} for row, loss in zip(rows, batch_losses, strict=True)] if batch_losses else rows


def run_training(cell: Cell, rank: int, folder: Path, *, validates: bool) -> dict[str, Any]:
    """Train, with a validation before the first step and after every step if it `validates`, and describe this rank."""
    folder.mkdir(exist_ok=True)
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank)) as stream:
        session = build_session(cell, policy, stream.statistics)
        torch.manual_seed(100 + rank)
        session.model.register_forward_hook(draw_numbers)
        metrics = MetricsLog(folder / "metrics.jsonl", start=0, block_steps=1, is_writer=rank == 0)
        validation = None
        if validates:
            validation = TwoValidations(cell, stream.samples, rank, folder)
        train(session, stream, start=0, steps=STEPS, metrics=metrics, checkpoints=None, validation=validation)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if rank == 0 else []
    return {
        "metrics": without_measurements(lines),
        "state": fingerprint(session),
        "modes": [module.training for module in session.model.modules()],
        "generators": digest(
            torch.get_rng_state().numpy().tobytes(), str(random.getstate()).encode(), str(np.random.get_state()).encode()
        ),
        "gathered_bytes": [
            handle.flat_param._full_param_padded.untyped_storage().size() for handle in fsdp1_handles(session.model)
        ],
        "backend": session.backend.observe().backend,
    }


class TwoValidations(Validation):
    """Validation of the averages of the weights, in `averages.jsonl`, and then of the weights, in `validation.jsonl`."""

    def __init__(self, cell: Cell, samples: object, rank: int, folder: Path) -> None:
        section = ValidationSection(every=1, at_start=True, batch=4)
        of_averages = section.model_copy(update={"weights": "averages"})
        passes = [
            ValidationPass(options, cell, samples, rank=rank, tracker=ProgressTracker()) for options in (section, of_averages)
        ]
        options: dict[str, Any] = {"start": 0, "is_writer": rank == 0}
        super().__init__(section, passes[0], path=folder / "validation.jsonl", **options)
        self._averages = Validation(of_averages, passes[1], path=folder / "averages.jsonl", **options)

    def run(self, session: Session, completed: int, stopping: Callable[[], bool] = never_stop) -> float | None:
        self._averages.run(session, completed, stopping)
        return super().run(session, completed, stopping)


def draw_numbers(*_: Any) -> None:
    """Draw from every generator of the process, as policies of others do."""
    torch.rand(1)
    random.random()
    np.random.rand()


def fingerprint(session: Session) -> str:
    """Return a hash of what this rank stores: weights, and what the optimizer keeps of them."""
    weights = [local_shard(parameter).detach() for parameter in session.model.parameters()]
    state = session.backend.prepared.stepping.state
    kept = [local_shard(value) for moments in state.values() for value in moments.values() if isinstance(value, torch.Tensor)]
    assert kept, "the optimizer keeps moments"
    stepped = [
        local_shard(tensor).detach() for group in session.backend.prepared.stepping.param_groups for tensor in group["params"]
    ]
    tensors = [tensor.cpu().contiguous().flatten().view(torch.uint8) for tensor in (*weights, *stepped, *kept)]
    return digest(*(tensor.numpy().tobytes() for tensor in tensors))


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"|".join(parts)).hexdigest()


def gathered(result: dict[str, Any]) -> list[dict[str, Any]]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, result)
    return ranks


def forget() -> None:
    """Drop accelerate's process-wide state, so that the next cell starts from nothing; the process group stays."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state.clear()


main(sys.argv[1])
