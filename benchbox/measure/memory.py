"""Peak memory of a rank: the allocator's counters on CUDA, the bytes of live tensor storages elsewhere."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, UntypedStorage

from benchbox.observer.hooks.dispatch import OperationDispatchMode, OperationListener
from benchbox.observer.introspect.tensors import local_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from benchbox.store.rank_result import RankMemory


def release_cached_memory(device: torch.device) -> None:
    """Return memory that nothing uses to the device, so that later peaks of reserved memory include none of it.

    To be called between construction and warm-up: the warm-up reserves again what a step needs, so that no measured step waits
    for the driver. Does nothing on a device without a caching allocator.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def limit_memory(model: nn.Module, device: torch.device, limit: int | None) -> Iterator[None]:
    """Raise `torch.OutOfMemoryError` inside the block as soon as this rank needs more than `limit` bytes; None is no limit.

    Steps in the block are slow where the device has no counters: every operation is watched. Take three of them at least, since
    the state of the optimizer begins with the first.
    """
    if limit is None:
        yield
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        yield  # the limit stays: timed steps cost nothing more under it
    else:
        with TensorStorageTracker(chain(model.parameters(), model.buffers()), limit_bytes=limit) as tracker:
            yield
        if tracker.exceeded is not None:  # and the policy went on
            raise tracker.exceeded


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peaks that `peak_memory` reports. Does nothing on a device without memory counters."""
    if device.type == "cuda":
        torch.cuda.init()  # before it, torch knows of no device to reset
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> RankMemory | None:
    """Return the record's `memory` of this rank since `reset_peak_memory`, or None on a device without memory counters."""
    if device.type != "cuda":
        return None
    return {
        "source": "torch.cuda",
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
        "reason": None,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory,
        "allocation_retries": int(torch.cuda.memory_stats(device)["num_alloc_retries"]),  # since the start: peaks are reset
    }


class TensorStorageTracker:
    """Counts the bytes of live tensor storages, each once however many tensors share it.

        with TensorStorageTracker(model.parameters()) as tracker:
            step()
        tracker.peak_bytes

    A storage counts from the first operation that touches it until it is freed. One that was first seen as an argument, not as
    a result, and is not freed before the end, existed before, such as optimizer state, or a reduction bucket, which C++ owns
    and which appears when it is reduced: it counts from the beginning. Scratch memory inside one operation, and memory reserved
    by an allocator, are not counted.

    Args:
        roots: tensors that count even if no operation touches them.
        listeners: shown the same operations.
        limit_bytes: the first operation after which more bytes live raises `torch.OutOfMemoryError`; None is no limit.
    """

    def __init__(
        self, roots: Iterable[Tensor] = (), listeners: Iterable[OperationListener] = (), limit_bytes: int | None = None
    ) -> None:
        self._limit_bytes = limit_bytes
        self.exceeded: torch.OutOfMemoryError | None = None  # that an operation has raised
        self._storages: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}  # size and reference by storage
        # Of each storage that was first seen as an argument: its size, its reference, and the peak until then.
        self._arguments: list[tuple[int, weakref.ref[UntypedStorage], int]] = []
        self._latest_peak_bytes = 0  # since the last of them
        self.current_bytes = 0
        self._mode = OperationDispatchMode(self, *listeners)
        for root in roots:
            for tensor in plain_tensors([local_shard(root)]):
                self._count(tensor.untyped_storage())

    @property
    def peak_bytes(self) -> int:
        """The most that lived at once."""
        peak, later = self._latest_peak_bytes, 0
        for size, reference, peak_before in reversed(self._arguments):
            later += 0 if reference() is None else size
            peak = max(peak, peak_before + later)
        return peak

    def __enter__(self) -> Self:
        self._resize = UntypedStorage.resize_

        # FSDP frees and restores gathered parameters by resizing their storage, which is no tensor operation.
        def resize_(storage: UntypedStorage, size: int) -> Any:
            if storage.device.type != "meta":
                self._count_argument(storage)
            resized = self._resize(storage, size)
            if storage._cdata in self._storages:  # noqa: SLF001 (the storage's identity)
                self._count(storage)
                self._check_limit("storage.resize_")
            return resized

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._latest_peak_bytes = self.peak_bytes  # whatever is freed later
        self._arguments.clear()

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for tensor in plain_tensors([*args, *kwargs.values()]):
            self._count_argument(tensor.untyped_storage())
        for tensor in plain_tensors([result]):
            self._count(tensor.untyped_storage())
        self._check_limit(operation)

    def _check_limit(self, operation: Any) -> None:
        limit = self._limit_bytes
        if limit is not None and self.current_bytes > limit:
            self._limit_bytes = None  # operations that run while this error is raised must not raise another in its place
            error = torch.OutOfMemoryError(
                f"{operation}: tensors take {self.current_bytes / 2**20:.1f} MiB on this rank, "
                f"and measure.memory_limit is {limit / 2**20:.1f} MiB"
            )
            error.operation = str(operation)  # type: ignore[attr-defined] # for the record
            self.exceeded = error
            raise error

    def _count_argument(self, storage: UntypedStorage) -> None:
        counted, peak_before = self._storages.get(storage._cdata), self._latest_peak_bytes  # noqa: SLF001
        if counted is not None and counted[0] == storage.nbytes():
            return
        self._count(storage)
        if counted is None:
            size, reference = self._storages[storage._cdata]  # noqa: SLF001
            self._arguments.append((size, reference, peak_before))
            self._latest_peak_bytes = self.current_bytes

    def _count(self, storage: UntypedStorage) -> None:
        """Count a storage at its present size, from now on."""
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001
        counted_size, reference = self._storages.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._release(key))
        elif size == counted_size:
            return
        self._storages[key] = (size, reference)
        self.current_bytes += size - counted_size
        self._latest_peak_bytes = max(self._latest_peak_bytes, self.current_bytes)

    def _release(self, key: int) -> None:
        size, _ = self._storages.pop(key)
        self.current_bytes -= size


def plain_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors with memory in nested tuples, lists and dictionaries. `tree_leaves` takes three times as long."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta and value.layout is torch.strided:
                tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += plain_tensors(value)
        elif isinstance(value, dict):
            tensors += plain_tensors(value.values())
    return tensors
