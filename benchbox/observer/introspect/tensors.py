"""Tensor helpers that work across torch versions and need no library imported: class checks by name, local shards, dtypes."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def has_class_named(instance: Any, *names: str) -> bool:
    """Return whether the class of an object, or one of its base classes, has one of these names.

    FSDP2 and DTensor moved between torch versions, and an isinstance check against a class of DeepSpeed would import DeepSpeed.
    """
    return any(base.__name__ in names for base in type(instance).__mro__)


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


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype of a tensor without the prefix: `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")
