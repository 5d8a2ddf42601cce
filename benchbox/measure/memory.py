"""Peak memory of a rank: the allocator's counters on CUDA, the bytes of live tensor storages elsewhere."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from benchbox.observer.hooks.dispatch import OperationDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterable


def reset_peak_memory(device: torch.device) -> None:
    """Forget peaks so far: the next `peak` is that of what follows. Nothing to forget on a device that does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, Any] | None:
    """The record's `memory` for one rank since `reset_peak`, or None on a device that counts nothing by itself."""
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
            step()  # meets every storage that a step uses, whoever holds it
            step()
        tracker.peak_bytes

    A storage counts from the first operation that touches it, or from the beginning when it is one of `roots`, until it is
    freed. Therefore the first step only finds what there is: reduction buckets are held by C++ and met when they are reduced.
    Scratch memory inside one operation is not seen, nor is what an allocator keeps in reserve.
    """

    def __init__(self, roots: Iterable[Tensor] = ()) -> None:
        self._live: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}  # bytes by storage
        self.current_bytes = 0
        self.peak_bytes = 0
        self._watch = OperationDispatchMode(self)
        for root in roots:
            self._note(root.to_local() if isinstance(root, DTensor) else root)

    def __enter__(self) -> Self:
        self._resize = UntypedStorage.resize_

        # Sharding frees and restores gathered parameters by resizing their storage, which is no tensor operation.
        def resize_(storage: UntypedStorage, size: int) -> Any:
            resized = self._resize(storage, size)
            if storage._cdata in self._live:  # noqa: SLF001 (the storage's identity)
                self._count(storage)
            return resized

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._watch.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._watch.__exit__(*exception)
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def on_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:  # noqa: ARG002
        for leaf in tree_leaves((arguments, options, result)):
            if isinstance(leaf, Tensor):
                self._note(leaf)

    def _note(self, tensor: Tensor) -> None:
        if tensor.device.type != "meta" and tensor.layout == torch.strided:
            self._count(tensor.untyped_storage())

    def _count(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001
        known, reference = self._live.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._freed(key))
        elif size == known:
            return
        self._live[key] = (size, reference)
        self.current_bytes += size - known
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _freed(self, key: int) -> None:
        size, _ = self._live.pop(key)
        self.current_bytes -= size
