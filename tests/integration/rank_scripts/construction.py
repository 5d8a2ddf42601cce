"""Builds each session twice, from a policy on the meta device and from one built whole, and compares what a rank holds:
`construction.py JOB.json`, the job being `{"cells": [cell, ...], "out": folder}`.

For each cell every rank writes `<index>-<rank>.json`: the names of tensors that differ in a bit, the loss and the gradient norm
of the first step of both, and the peak of tensor storages, in bytes, while the policy was built and prepared. Under ZeRO
the peak is that before DeepSpeed's engine exists: its buckets are as large as a tiny policy.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from benchbox.measure.memory import TensorStorageTracker
from benchbox.observer.introspect.names import live_parameters
from benchbox.observer.introspect.tensors import local_shard
from benchbox.observer.introspect.wrappers import optimizer_chain, zero_optimizer
from benchbox.session import Session, build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell
from tests.integration.rank_scripts.cells import forget
from tests.support.direct_construction import build_directly

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.contracts import Policy


def main(job_file: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    rank = int(os.environ["RANK"])
    for index, values in enumerate(job["cells"]):
        cell = Cell.from_dict(values)
        plan = build_cell_policy(cell)
        deferred, direct = (run(cell, rank, plan, build) for build in (build_cell_policy, build_directly))
        result = {
            "tensors": len(direct["tensors"]),
            "different": sorted(
                name
                for name in direct["tensors"].keys() | deferred["tensors"].keys()
                if not same_bits(deferred["tensors"].get(name), direct["tensors"].get(name))
            ),
            "full_bytes": direct["full_bytes"],
            "unit_bytes": direct["unit_bytes"],
            **{key: [deferred[key], direct[key]] for key in ("loss", "grad_norm", "peak_bytes")},
        }
        (Path(job["out"]) / f"{index}-{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(cell: Cell, rank: int, plan: Policy, build: Callable[[Cell], Any]) -> dict[str, Any]:
    """Return what a rank holds of the policy that `build` returns; `plan` is one whose weights are never computed."""
    with closing(open_cell_data(cell, plan, rank)) as stream:
        with TensorStorageTracker() as tracker, pytest.MonkeyPatch.context() as patch:
            peaks = note_peak_before_engine(tracker, patch)
            policy = build(cell)
            sizes = {"full_bytes": 4 * sum(p.numel() for p in policy.parameters()), "unit_bytes": largest_unit_bytes(policy)}
            session = build_session(cell, policy, stream.statistics)
        tensors = {name: tensor.detach().clone() for name, tensor in held_tensors(session).items()}
        step = session.step(stream)
    result = {"tensors": tensors, "loss": float(step.loss), "grad_norm": float(step.grad_norm), **sizes}
    forget()
    return result | {"peak_bytes": [*peaks, tracker.peak_bytes][0]}


def note_peak_before_engine(tracker: TensorStorageTracker, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the peak is appended when accelerate begins to build DeepSpeed's engine."""
    peaks: list[int] = []
    prepare = Accelerator._prepare_deepspeed

    def noting(accelerator: Accelerator, *arguments: Any) -> Any:
        peaks.append(tracker.peak_bytes)
        return prepare(accelerator, *arguments)

    patch.setattr(Accelerator, "_prepare_deepspeed", noting)
    return peaks


def largest_unit_bytes(policy: Policy) -> int:
    """Return the size in float32 of the largest unit, one being all parameters outside layers."""
    layers = [module for module in policy.modules() if isinstance(module, policy.layer_units())]  # type: ignore[attr-defined]
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    outside = sum(parameter.numel() for parameter in policy.parameters()) - sum(sizes)  # type: ignore[attr-defined]
    return 4 * max(*sizes, outside)


def held_tensors(session: Session) -> dict[str, torch.Tensor]:
    """Return this rank's parts of parameters, buffers and stepped tensors."""
    prepared = session.backend.prepared
    tensors = {f"live {name}": local_shard(parameter) for name, parameter in live_parameters(prepared.model)}
    tensors |= {f"buffer {name}": buffer for name, buffer in prepared.model.named_buffers()}
    stepped = [parameter for group in prepared.stepping.param_groups for parameter in group["params"]]
    stepped += getattr(prepared.stepping, "masters", [])
    zero = zero_optimizer(optimizer_chain(prepared.optimizer))
    for attribute in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        stepped += getattr(zero, attribute, None) or []
    return tensors | {f"stepped {index}": local_shard(tensor) for index, tensor in enumerate(stepped)}


def same_bits(tensor: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if tensor is None or wanted is None:
        return False
    return tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


if __name__ == "__main__":
    main(sys.argv[1])
