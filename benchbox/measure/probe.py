"""Probe of steps that are not timed: collectives, kernels, recomputation, FLOPs, and memory on devices without counters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from benchbox.measure.flops import FlopCounter, unknown_utilisation, utilisation
from benchbox.measure.kernels import CallSite, KernelNames, Recomputation
from benchbox.measure.memory import TensorStorageTracker
from benchbox.measure.phases import NONE, Instrument
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.observer.hooks.matmuls import MatmulDtypes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.registry.launch_record import CollectiveRecord, Flops
    from benchbox.store.rank_result import RankMemory, Utilisation


class ProbedSession(Protocol):
    """Session with a wrapped model and a step over a source of batches."""

    @property
    def model(self) -> nn.Module: ...

    def step(self, micro_batches: Any, instruments: Instrument) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Result of a probe, in the form of `rank<r>.json`.

    `attention_kernel` is None if no attention ran, `attention_sites` has the kernels by call site. `checkpointed_modules` is
    the number of units that were recomputed. `memory` is None if the device has memory counters, which
    `benchbox.measure.memory.peak_memory` reads.
    """

    collectives: dict[str, CollectiveRecord]
    attention_kernel: str | None
    attention_sites: dict[str, list[str]]
    checkpointed_modules: int
    matmul_dtypes: set[str]
    flops: Flops
    memory: RankMemory | None
    device_name: str
    micro_batches: list[Any]  # of the probed step

    def utilisation(self, step_time_s: Sequence[float]) -> Utilisation:
        """Return `mfu`, `hfu` and `mfu_reason` of steps that took `step_time_s` on this rank."""
        model, recomputed = self.flops["model_flops_per_step"], self.flops["recomputed_flops_per_step"]
        if model is None or recomputed is None:
            reason = self.flops["reason"]
            assert reason is not None, "FLOPs are unknown for a reason"
            return unknown_utilisation(reason)
        return utilisation(model, recomputed, step_time_s, self.device_name, self.matmul_dtypes)


def probe(
    session: ProbedSession,
    micro_batches: Any,
    units: tuple[type[nn.Module], ...],
    device: torch.device,
    instruments: Instrument = NONE,
) -> ProbeResult:
    """Run one step under every counter, and two more under the storage tracker if the device has no memory counters.

    Call it after a few steps, when optimizer state and buckets exist.
    """
    call_site = CallSite(session.model)
    collectives, flops, kernels, matmuls = CollectiveCounter(), FlopCounter(), KernelNames(call_site), MatmulDtypes()
    probed_batches: list[Any] = []
    recomputation, dispatch = Recomputation(session.model, units), OperationDispatchMode(collectives, flops, kernels, matmuls)
    with call_site, recomputation, dispatch:
        session.step(_record_batches(micro_batches, probed_batches), instruments)
    return ProbeResult(
        collectives={name: {"count": totals["count"], "bytes": totals["bytes"]} for name, totals in collectives.counts.items()},
        attention_kernel=kernels.attention,
        attention_sites=kernels.sites,
        checkpointed_modules=recomputation.units,
        matmul_dtypes=set(matmuls.counts),
        flops=_flop_record(flops, kernels.attention),
        memory=None if device.type == "cuda" else _storage_peak(session, micro_batches, instruments),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type}",
        micro_batches=probed_batches,
    )


def _record_batches(micro_batches: Any, record: list[Any]) -> Iterator[Any]:
    """Yield the micro-batches, and append each to `record`."""
    for batch in micro_batches:
        record.append(batch)
        yield batch


def _flop_record(flops: FlopCounter, kernel: str | None) -> Flops:
    if kernel is not None and "flex" in kernel.split("+"):
        reason = "FlexAttention runs compiled, and its products are not seen"
        return {"model_flops_per_step": None, "recomputed_flops_per_step": None, "reason": reason}
    return {
        "model_flops_per_step": flops.total - flops.recomputed,
        "recomputed_flops_per_step": flops.recomputed,
        "reason": None,
    }


def _storage_peak(session: ProbedSession, micro_batches: Any, instruments: Instrument) -> RankMemory:
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
