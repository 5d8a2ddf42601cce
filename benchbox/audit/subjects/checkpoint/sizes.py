"""Refuse files that claim more than they hold, by their sizes and before any value is read.

A view with a stride of zero, or a compressed archive, makes terabytes of a file of a kilobyte.
"""

from __future__ import annotations

import zipfile
from typing import IO, TYPE_CHECKING, Any

from torch import Tensor

from benchbox.errors import DataError
from benchbox.observer.introspect.tensors import local_shard

if TYPE_CHECKING:
    from pathlib import Path

# Tied weights are stored once and named several times, and small buffers may be expanded.
_TIMES_FILE = 8
_ALWAYS_ALLOWED_BYTES = 64 * 2**20


def check_archive_size(archive: Path | IO[bytes], size: int, path: Path) -> None:
    """Check the archive that `torch.save` wrote, of `size` bytes, which is never compressed.

    Raises:
        DataError: unpacked it is larger than the file.
    """
    try:
        with zipfile.ZipFile(archive) as members:
            unpacked = sum(member.file_size for member in members.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # torch reports what is damaged
    if unpacked > size + _ALWAYS_ALLOWED_BYTES:
        raise DataError(f"{path}: {size} bytes that unpack to {unpacked}: not read, since torch.save compresses nothing")


def check_tensor_sizes(value: Any, size: int, path: Path) -> None:
    """Check the tensors, in nested containers, that a file of `size` bytes holds.

    Raises:
        DataError: they are far larger than the file.
    """
    claimed, largest = 0, 0
    for tensor in _tensors(value):
        tensor_bytes = tensor.numel() * tensor.element_size()
        claimed, largest = claimed + tensor_bytes, max(largest, tensor_bytes)
    if claimed > _TIMES_FILE * size + _ALWAYS_ALLOWED_BYTES:
        raise DataError(
            f"{path}: a file of {size} bytes that claims tensors of {claimed} bytes, the largest of {largest}: not read, since "
            "they repeat what is stored"
        )


def _tensors(value: Any) -> list[Tensor]:
    """Return every tensor once, however many containers share it."""
    tensors, seen, remaining = [], set(), [value]
    while remaining:
        item = remaining.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            tensors.append(local_shard(item))
        elif isinstance(item, dict):
            remaining += item.values()
        elif isinstance(item, list | tuple | set):
            remaining += item
    return tensors
