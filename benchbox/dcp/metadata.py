"""Metadata of checkpoints of `torch.distributed.checkpoint`, read without running any code in it.

Only such a checkpoint needs this module: torch's own takes longer to import than most checkpoints take to audit.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import is_dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp

from benchbox.dcp.untrusted import PROGRAM, first_line
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

_CONTAINERS = {"collections": {"OrderedDict"}, "torch": {"Size", "device"}}
# Records and enumerations: creating one runs nothing but their plain constructors.
_DCP_RECORDS = frozenset(
    name for name, kind in vars(dcp).items() if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum))
)


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler that admits only the plain records of the metadata of distributed checkpoints."""

    def find_class(self, module: str, name: str) -> Any:
        if module == dcp.__name__ and name in _DCP_RECORDS:
            return getattr(dcp, name)
        if name in _CONTAINERS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch.serialization" and name == "_get_layout":
            return {"torch.strided": torch.strided}.__getitem__
        if module == "torch.distributed.checkpoint.filesystem" and name in {"_StorageInfo", "_StoragePrefix"}:
            return super().find_class(module, name)
        # Python 3.13 writes the module in which it has the classes.
        if module in ("pathlib", "pathlib._local") and name in {"Path", "PosixPath", "WindowsPath"}:
            return PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _refuse(f"{module}.{name}")


class _ForeignNameError(pickle.UnpicklingError):
    """A name that no metadata contains."""


def _refuse(name: str) -> NoReturn:
    raise _ForeignNameError(name)


def load_metadata(path: Path) -> dcp.Metadata:
    """Load the `.metadata` of a distributed checkpoint.

    Raises:
        DataError: it is damaged, or is anything but such metadata.
    """
    try:
        metadata = MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except _ForeignNameError as error:
        raise DataError(f"{path}: {PROGRAM} ({first_line(error)})") from error
    except Exception as error:
        raise DataError(f"{path}: damaged ({first_line(error)})") from error
    if not isinstance(metadata, dcp.Metadata):
        raise DataError(f"{path}: not the metadata of a distributed checkpoint")
    return metadata
