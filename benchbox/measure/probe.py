"""Looks closely at steps that are not timed: collectives, kernels, recomputation, FLOPs, and memory where no counter exists."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from benchbox.measure.flops import FlopCounter, unknown_utilisation, utilisation
from benchbox.measure.kernels import KernelNames, Recomputation
from benchbox.measure.memory import TensorStorageTracker
from benchbox.measure.phases import NONE, Instrument
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.observer.hooks.matmuls import MatmulDtypes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Steps(Protocol):
    """What is probed: anything with a wrapped model and a step over a source of batches."""

    @property
    def model(self) -> nn.Module: ...

    def step(self, micro_batches: Any, instruments: Instrument) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What was seen, in the shapes of `rank<r>.json`.

    `attention_kernel` is None when no attention ran, `checkpointed_modules` counts units that were recomputed, and `memory` is
    None where `benchbox.measure.memory.peak` has the counters of the device.
    """

    collectives: dict[str, dict[str, int]]
    attention_kernel: str | None
    checkpointed_modules: int
    matmul_dtypes: set[str]
    flops: dict[str, Any]
    memory: dict[str, Any] | None
    device_name: str
    micro_batches: list[Any]  # of the step that was looked at

    def utilisation(self, step_time_s: Sequence[float]) -> dict[str, Any]:
        """`mfu`, `hfu` and `mfu_reason` of steps that took so long on this rank."""
        model, recomputed = self.flops["model_flops_per_step"], self.flops["recomputed_flops_per_step"]
        if model is None:
            return unknown_utilisation(self.flops["reason"])
        return utilisation(model, recomputed, step_time_s, self.device_name, self.matmul_dtypes)


def probe(
    session: Steps,
    micro_batches: Any,
    units: tuple[type[nn.Module], ...],
    device: torch.device,
    instruments: Instrument = NONE,
) -> ProbeResult:
    """Run one step under every observer, and two more under the storage tracker where the device counts no memory.

    Call it after a few steps: it shows a step as it is once optimizer state and buckets exist.
    """
    collectives, flops, kernels, products = CollectiveCounter(), FlopCounter(), KernelNames(), MatmulDtypes()
    taken: list[Any] = []
    with Recomputation(session.model, units) as recomputation, OperationDispatchMode(collectives, flops, kernels, products):
        session.step(_noted(micro_batches, taken), instruments)
    return ProbeResult(
        collectives=collectives.counts,
        attention_kernel=kernels.attention,
        checkpointed_modules=recomputation.units,
        matmul_dtypes=set(products.forward),
        flops=_counted(flops, kernels.attention),
        memory=None if device.type == "cuda" else _storage_peak(session, micro_batches, instruments),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type}",
        micro_batches=taken,
    )


def _noted(micro_batches: Any, taken: list[Any]) -> Iterator[Any]:
    """The same, and those that were taken in a list."""
    for batch in micro_batches:
        taken.append(batch)
        yield batch


def _counted(flops: FlopCounter, kernel: str | None) -> dict[str, Any]:
    if kernel is not None and "flex" in kernel.split("+"):
        reason = "FlexAttention runs compiled, and its products are not seen"
        return {"model_flops_per_step": None, "recomputed_flops_per_step": None, "reason": reason}
    return {
        "model_flops_per_step": flops.total - flops.recomputed,
        "recomputed_flops_per_step": flops.recomputed,
        "reason": None,
    }


def _storage_peak(session: Steps, micro_batches: Any, instruments: Instrument) -> dict[str, Any]:
    model = session.model
    with TensorStorageTracker(chain(model.parameters(), model.buffers())) as tracker:
        session.step(micro_batches, instruments)
        session.step(micro_batches, instruments)
    return {
        "source": "tensor_storage",
        "allocated_peak_bytes": tracker.peak_bytes,
        "reserved_peak_bytes": None,
        "reason": "bytes of live tensor storages: no caching allocator reserves memory on this device",
    }
