"""Knowing things by their kind, across versions of torch and whether or not a library is imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def has_class_named(thing: Any, *names: str) -> bool:
    """Whether a class of one of these names is among those of a thing. FSDP2 and DTensor moved from one torch to the next, and
    asking for DeepSpeed's classes would import it.
    """
    return any(kind.__name__ in names for kind in type(thing).__mro__)


def local_shard(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the shard of a DTensor or of a ZeRO-3 parameter, else the tensor itself."""
    if has_class_named(tensor, "DTensor"):
        shard = tensor.to_local()  # type: ignore[attr-defined]
        return shard.wait() if has_class_named(shard, "AsyncCollectiveTensor") else shard  # type: ignore[no-any-return]
    held = getattr(tensor, "ds_tensor", None)
    return held if isinstance(held, Tensor) else tensor


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
