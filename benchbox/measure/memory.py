"""Peak memory of a rank: the allocator's counters on CUDA, the bytes of live tensor storages elsewhere."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.observer.introspect.tensors import local_shard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.store.rank_result import RankMemory


def release_cached_memory(device: torch.device) -> None:
    """Return memory that nothing uses to the device, so that later peaks of reserved memory include none of it.

    To be called between construction and warm-up: the warm-up reserves again what a step needs, so that no measured step waits
    for the driver. Does nothing on a device without a caching allocator.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peaks that `peak_memory` reports. Does nothing on a device without memory counters."""
    if device.type == "cuda":
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
    }


class TensorStorageTracker:
    """Counts the bytes of live tensor storages, each once however many tensors share it.

        with TensorStorageTracker(model.parameters()) as tracker:
            step()  # finds every storage that a step uses
            step()
        tracker.peak_bytes

    A storage counts from the first operation that touches it, or from the beginning if it belongs to one of `roots`, until it
    is freed. The first step therefore only finds the existing storages: reduction buckets, for example, are owned by C++ and
    appear when they are reduced. Scratch memory inside one operation and memory reserved by an allocator are not counted.
    """

    def __init__(self, roots: Iterable[Tensor] = ()) -> None:
        self._storages: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}  # size and reference by storage
        self.current_bytes = 0
        self.peak_bytes = 0
        self._mode = OperationDispatchMode(self)
        for root in roots:
            self._count_tensor(local_shard(root))

    def __enter__(self) -> Self:
        self._resize = UntypedStorage.resize_

        # FSDP frees and restores gathered parameters by resizing their storage, which is no tensor operation.
        def resize_(storage: UntypedStorage, size: int) -> Any:
            resized = self._resize(storage, size)
            if storage._cdata in self._storages:  # noqa: SLF001 (the storage's identity)
                self._count_storage(storage)
            return resized

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._count_tensor(leaf)

    def _count_tensor(self, tensor: Tensor) -> None:
        if tensor.device.type != "meta" and tensor.layout == torch.strided:
            self._count_storage(tensor.untyped_storage())

    def _count_storage(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001
        counted_size, reference = self._storages.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._release(key))
        elif size == counted_size:
            return
        self._storages[key] = (size, reference)
        self.current_bytes += size - counted_size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _release(self, key: int) -> None:
        size, _ = self._storages.pop(key)
        self.current_bytes -= size
