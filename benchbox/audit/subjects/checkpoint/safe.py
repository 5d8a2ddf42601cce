"""Reading files that somebody else wrote, without running anything in them.

A pickle is a program. torch's `weights_only` unpickler runs none of it: it builds tensors and plain containers, and refuses the
rest. Beside their tensors checkpoints hold objects of many classes, DeepSpeed's loss scaler or a script's own configuration:
each such class is replaced by one that keeps nothing and does nothing, and is never imported.
"""

from __future__ import annotations

import io
import pickle
import sys
from _compat_pickle import IMPORT_MAPPING
from dataclasses import is_dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

# Python's own modules, also by the names that pickles for Python 2 have for them.
_PYTHON = sys.stdlib_module_names | IMPORT_MAPPING.keys()
# What pickles may name of them and still be no program: parts of settings, and how instances and nested classes are pickled.
_RECORDS = ("argparse.", "collections.", "datetime.", "decimal.", "enum.", "fractions.", "pathlib.", "types.Simple", "uuid.")
_PLAIN = frozenset({"functools.partial", "copy_reg._reconstructor"}) | {
    f"__builtin__.{name}" for name in ("complex", "frozenset", "getattr", "object", "slice", "xrange")
}
_PROGRAM = "a program, not read and not run"
_CONTAINERS = {"collections": {"OrderedDict"}, "torch": {"Size", "device"}}
# Records and enumerations: making one runs nothing but their own plain constructors.
_DCP = frozenset(
    name for name, kind in vars(dcp).items() if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum))
)


class IgnoredObject:
    """Stands where an object of another class was, and keeps nothing of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whatever it is made with is let go."""

    def __setstate__(self, _: Any) -> None:
        """Whatever it was is let go."""


def load_file(path: Path) -> Any:
    """What `torch.save` wrote: tensors are mapped from the file, not read.

    Raises:
        DataError: the file is damaged, is no such file, or can only be read by running what is in it.
    """
    mapped = _is_zip(path)
    foreign = _foreign(path) if mapped else []  # the old format is read whole, and only without foreign classes
    if strange := sorted(name for name in foreign if _could_run(name)):
        raise DataError(f"{path}: {_PROGRAM}: it calls {', '.join(strange)}")
    with safe_globals([(IgnoredObject, name) for name in foreign]):
        return _loaded(path, path, mmap=mapped)


def _foreign(path: Path) -> list[str]:
    try:
        return get_unsafe_globals_in_checkpoint(str(path))
    except Exception as error:
        raise DataError(f"{path}: not a checkpoint file of torch, or damaged ({_line(error)})") from error


def _could_run(name: str) -> bool:
    """Whether nothing but a program would name this: a function of the interpreter's own. It would not be run here, whatever it
    is, but a file that holds it is no checkpoint.
    """
    return name.split(".")[0] in _PYTHON and not name.startswith(_RECORDS) and name not in _PLAIN


def load_bytes(held: io.BytesIO, path: Path) -> Any:
    """What `torch.save` wrote into a part of a file; `path` is for the error.

    Raises:
        DataError: as `load_file`.
    """
    return _loaded(held, path, mmap=False)


def _loaded(source: Path | io.BytesIO, path: Path, *, mmap: bool) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: {_PROGRAM} ({_line(error)})") from error
    except Exception as error:
        raise DataError(f"{path}: damaged ({_line(error)})") from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


class _MetadataUnpickler(pickle.Unpickler):
    """Of pickled globals, only the plain records that distributed checkpoints describe themselves with."""

    def find_class(self, module: str, name: str) -> Any:
        if module == dcp.__name__ and name in _DCP:
            return getattr(dcp, name)
        if name in _CONTAINERS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch.serialization" and name == "_get_layout":
            return {"torch.strided": torch.strided}.__getitem__
        if module == "torch.distributed.checkpoint.filesystem" and name in {"_StorageInfo", "_StoragePrefix"}:
            return super().find_class(module, name)
        if module == "pathlib" and name in {"Path", "PosixPath", "WindowsPath"}:
            return PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _refuse(f"{module}.{name}")


def _refuse(name: str) -> NoReturn:
    raise pickle.UnpicklingError(name)


def load_metadata(path: Path) -> dcp.Metadata:
    """The `.metadata` of a distributed checkpoint.

    Raises:
        DataError: it is damaged, or holds anything but such metadata.
    """
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: {_PROGRAM} ({_line(error)})") from error
    except Exception as error:
        raise DataError(f"{path}: damaged ({_line(error)})") from error
    if not isinstance(found, dcp.Metadata):
        raise DataError(f"{path}: not the metadata of a distributed checkpoint")
    return found


def _line(error: Exception) -> str:
    """The first line of what a library said."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
