"""Tensor helpers that work across torch versions and need no library imported: class checks by name, local shards, dtypes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# torchao's tensors of quantised optimizer state, which claim the dtype that they are read in.
QUANTISED = {"OptimState8bit": "uint8", "OptimState4bit": "uint4", "OptimStateFp8": "float8_e4m3fn"}


def has_class_named(instance: Any, *names: str) -> bool:
    """Return whether the class of an object, or one of its base classes, has one of these names.

    FSDP2 and DTensor moved between torch versions, and an isinstance check against a class of DeepSpeed would import DeepSpeed.
    """
    return not _class_names(type(instance)).isdisjoint(names)  # type: ignore[arg-type] # mypy takes type[Any] for unhashable


def is_of_package(instance: Any, package: str) -> bool:
    """Return whether the class of an object, or one of its base classes, is defined in a package, which is not imported."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(instance).__mro__)


@lru_cache(maxsize=512)
def _class_names(kind: type[Any]) -> frozenset[str]:
    return frozenset(base.__name__ for base in kind.__mro__)


def has_shape(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape yet: those of a lazy module that was never called have none."""
    return not has_class_named(tensor, "UninitializedTensorMixin")


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank stores.

    This is the local tensor of a DTensor (after pending collectives), the partition of a ZeRO-3 parameter (`ds_tensor`), and
    any other tensor itself.
    """
    if has_class_named(tensor, "DTensor"):
        shard = tensor.to_local()  # type: ignore[attr-defined]
        return shard.wait() if has_class_named(shard, "AsyncCollectiveTensor") else shard  # type: ignore[no-any-return]
    partition = getattr(tensor, "ds_tensor", None)
    return partition if isinstance(partition, Tensor) else tensor


def local_norm(tensor: Tensor) -> float:
    """Return the norm of the part of a tensor that this rank stores, computed in float32 or the larger dtype that it has."""
    shard = local_shard(tensor).detach()
    precision = torch.promote_types(shard.dtype, torch.float32)
    return torch.linalg.vector_norm(shard, dtype=precision).item() if shard.numel() else 0.0


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype that a tensor is stored in, without the prefix: `bfloat16`."""
    return QUANTISED.get(type(tensor).__name__) or str(tensor.dtype).removeprefix("torch.")


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has torch's own operations: others may be quantised, and refuse to be indexed."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; those of its parts where it is quantised."""
    if type(tensor).__name__ in QUANTISED:
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
