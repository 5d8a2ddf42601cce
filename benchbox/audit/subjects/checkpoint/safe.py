"""Read untrusted files without running any code in them.

A pickle is a program. torch's `weights_only` unpickler does not run it: it builds tensors and plain containers, and refuses
everything else. Beside their tensors, checkpoints contain objects of many classes, such as DeepSpeed's loss scaler or a
script's own configuration: each such class is replaced by an empty placeholder, and is never imported.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from benchbox.audit.subjects.checkpoint.placeholders import Placeholders, is_code
from benchbox.audit.subjects.checkpoint.sizes import check_archive_size, check_tensor_sizes
from benchbox.dcp.untrusted import PROGRAM, first_line
from benchbox.errors import DataError

if TYPE_CHECKING:
    import io

_NO_CHECKPOINT = "not a checkpoint: neither safetensors nor a file of torch.save"
_FOREIGN_TENSORS = "not read: it holds tensors that only code of their class can read; save plain tensors or DTensors"
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # first bytes of files of torch.save, today's and before torch 1.6


def load_torch_file(path: Path) -> Any:
    """Load a file of `torch.save`; tensors are mapped from the file, not read.

    Raises:
        DataError: the file is damaged, is no such file, claims more than it holds, or could only be read by running code in it.
    """
    mapped, size = _is_zip(path), path.stat().st_size
    if mapped:
        check_archive_size(path, size, path)
    foreign = _foreign_classes(path) if mapped else []  # the old format is read at once, and only without foreign classes
    if calls := sorted(name for name in foreign if is_code(name)):
        raise DataError(f"{path}: {PROGRAM}: it calls {', '.join(calls)}")
    placeholders = Placeholders(foreign)
    while True:
        try:
            with safe_globals(placeholders.pairs()):
                return _torch_load(path, path, size=size, mmap=mapped)
        except DataError as error:
            if "Creating a Tensor subclass" in str(error):  # such as FSDP1's ShardedTensor
                classes = [name for name in foreign if name.endswith("Tensor")] or foreign
                raise DataError(f"{path}: {_FOREIGN_TENSORS} ({', '.join(classes[:3])})") from error
            if not placeholders.make_container(error.__cause__):
                raise


def _foreign_classes(path: Path) -> list[str]:
    try:
        return get_unsafe_globals_in_checkpoint(str(path))
    except Exception as error:
        raise DataError(f"{path}: not a checkpoint file of torch, or damaged ({first_line(error)})") from error


def load_torch_bytes(buffer: io.BytesIO, path: Path) -> Any:
    """Load the output of `torch.save` from a part of a file; `path` is for the error message.

    Raises:
        DataError: see `load_torch_file`.
    """
    size = buffer.getbuffer().nbytes
    check_archive_size(buffer, size, path)
    buffer.seek(0)
    return _torch_load(buffer, path, size=size, mmap=False)


def _torch_load(source: Path | io.BytesIO, path: Path, *, size: int, mmap: bool) -> Any:
    try:
        value = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: {_refusal(source, error)}") from error
    except Exception as error:
        problem = f"damaged ({first_line(error)})" if _is_torch_file(source) else _NO_CHECKPOINT
        raise DataError(f"{path}: {problem}") from error
    check_tensor_sizes(value, size, path)
    return value


def _refusal(source: Path | io.BytesIO, error: pickle.UnpicklingError) -> str:
    """Return why torch refused a file, without torch's advice to load it with `weights_only=False`."""
    if call := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"{PROGRAM}: it calls {call[1]}"
    if _is_torch_file(source):
        return f"{PROGRAM}: a pickle of other contents than tensors and plain containers"
    return _NO_CHECKPOINT


def _is_torch_file(source: Path | io.BytesIO) -> bool:
    """Return whether a file begins as those of `torch.save`: text may have any letter first, and many are pickle opcodes."""
    head = _first_bytes(source)
    return head == _ZIP or head.startswith(_PICKLE)


def _is_zip(path: Path) -> bool:
    return _first_bytes(path) == _ZIP


def _first_bytes(source: Path | io.BytesIO) -> bytes:
    if not isinstance(source, Path):
        return bytes(source.getbuffer()[:4])
    with source.open("rb") as file:
        return file.read(4)
