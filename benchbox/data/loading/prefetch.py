"""Copies of micro-batches on a CUDA device, which are made while the step before is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch


class Copier(Protocol):
    """Copier of batches to a device."""

    def start(self, batch: Batch) -> Batch:
        """Start copying a batch, and return the copy, which must not be used before `finish`."""

    def finish(self, copy: Batch) -> Batch:
        """Return a copy for use in the current stream of the device."""


class CudaCopier:
    """Copier to this rank's CUDA device, in a stream beside that of the step. Batches are in page-locked memory."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)

    def start(self, batch: Batch) -> Batch:
        """Start copying a batch, and return the copy, which must not be used before `finish`."""
        with torch.cuda.stream(self._stream):
            return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}

    def finish(self, copy: Batch) -> Batch:
        """Return a copy for use in the current stream, which waits for it; the host does not."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in copy.values():
            tensor.record_stream(current)  # its memory is of the other stream, which must not reuse it before the step ends
        return copy
