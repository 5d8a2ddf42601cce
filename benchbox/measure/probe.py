"""Probe of a step that is not timed: collectives, kernels, recomputation, FLOPs, and memory on devices without counters."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch

from benchbox.measure.flops import FlopCounter, unknown_utilisation, utilisation
from benchbox.measure.kernels import CallSite, KernelNames, Recomputation
from benchbox.measure.memory import TensorStorageTracker
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode, OperationListener
from benchbox.observer.hooks.matmuls import MatmulDtypes
from benchbox.observer.hooks.operations import OperationRecorder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from benchbox.registry.launch_record import CollectiveRecord, Flops
    from benchbox.store.rank_result import RankMemory, Utilisation


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


class StepProbe:
    """Counts all operations of one step that is not timed.

        probe = StepProbe(session.model, units, device)
        with probe:
            session.step(probe.record(batches))
        probe.result()

    Take a few steps before, so that optimizer state and reduction buckets exist.

    Args:
        model: the wrapped model.
        units: classes of the modules that may be checkpointed.
        device: memory is counted by storages unless this device has memory counters.
        is_compiled: whether torch.compile has compiled a part of the model, whose buffers no operation allocates.
    """

    def __init__(
        self, model: nn.Module, units: tuple[type[nn.Module], ...], device: torch.device, *, is_compiled: bool = False
    ) -> None:
        self._device, self._is_compiled = device, is_compiled
        self._batches: list[Any] = []
        self._call_site, self._recomputation = CallSite(model), Recomputation(model, units)
        self._collectives, self._flops, self._matmuls = CollectiveCounter(), FlopCounter(), MatmulDtypes()
        self._kernels = KernelNames(self._call_site)
        counters: list[OperationListener] = [self._collectives, self._flops, self._kernels, self._matmuls]
        roots = chain(model.parameters(), model.buffers())
        self._storages = None if device.type == "cuda" else TensorStorageTracker(roots, counters)
        self._dispatch = self._storages or OperationDispatchMode(*counters)
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        for context in (self._call_site, self._recomputation, self._dispatch):
            self._contexts.enter_context(context)
        return self

    def __exit__(self, *exception: object) -> None:
        self._contexts.close()

    def record(self, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches, and keep them for the result."""
        for batch in micro_batches:
            self._batches.append(batch)
            yield batch

    @property
    def operations(self) -> OperationRecorder:
        """The operations of the step, for an observer of the same step."""
        return OperationRecorder(self._collectives, self._matmuls)

    def result(self) -> ProbeResult:
        """Return the counts, once the step was taken."""
        counts = self._collectives.counts
        return ProbeResult(
            collectives={name: {"count": totals["count"], "bytes": totals["bytes"]} for name, totals in counts.items()},
            attention_kernel=self._kernels.attention,
            attention_sites=self._kernels.sites,
            checkpointed_modules=self._recomputation.units,
            matmul_dtypes=set(self._matmuls.counts),
            flops=_flop_record(self._flops, self._kernels.attention),
            memory=None if self._storages is None else _storage_record(self._storages, is_compiled=self._is_compiled),
            device_name=torch.cuda.get_device_name(self._device) if self._storages is None else f"this {self._device.type}",
            micro_batches=self._batches,
        )


def _flop_record(flops: FlopCounter, kernel: str | None) -> Flops:
    if kernel is not None and "flex" in kernel.split("+"):
        reason = "FlexAttention runs compiled, and its products are not seen"
        return {"model_flops_per_step": None, "recomputed_flops_per_step": None, "reason": reason}
    return {
        "model_flops_per_step": flops.total - flops.recomputed,
        "recomputed_flops_per_step": flops.recomputed,
        "reason": None,
    }


def _storage_record(storages: TensorStorageTracker, *, is_compiled: bool) -> RankMemory:
    if is_compiled:
        return {
            "source": "tensor_storage",
            "allocated_peak_bytes": None,
            "reserved_peak_bytes": None,
            "reason": "compiled code allocates buffers that no operation shows, and this device has no memory counters",
        }
    return {
        "source": "tensor_storage",
        "allocated_peak_bytes": storages.peak_bytes,
        "reserved_peak_bytes": None,
        "reason": "bytes of live tensor storages: no caching allocator reserves memory on this device",
    }
