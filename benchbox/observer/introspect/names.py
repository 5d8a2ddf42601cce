"""Parameters of wrapped models: their names before wrapping, their unsharded shapes and their storages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tensors import has_class_named, local_shard
from .wrappers import fsdp1_handles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

# Parts that wrappers add to parameter names. Without them the names are those of the unwrapped model.
_WRAPPER_PARTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"})


def unwrapped_name(wrapped_name: str) -> str:
    """Return the name that a parameter has in the unwrapped model."""
    return ".".join(part for part in wrapped_name.split(".") if part not in _WRAPPER_PARTS)


def live_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a wrapped model with the names they had before it was wrapped."""
    for path, parameter in model.named_parameters():
        yield unwrapped_name(path), parameter


def parameter_ndims(model: nn.Module) -> dict[int, int]:
    """Return the number of unsharded dimensions of each parameter, by the id of the parameter. Unknown ones are left out.

    FSDP1 leaves a rank with flat shards and ZeRO-3 with empty tensors; both keep the original shapes.
    """
    ndims = {id(p): len(getattr(p, "ds_shape", p.shape)) for p in model.parameters() if not has_class_named(p, "FlatParameter")}
    for handle in fsdp1_handles(model):
        flat = handle.flat_param
        for parameter, shape in zip(getattr(flat, "_params", None) or (), flat._shapes, strict=False):  # noqa: SLF001
            ndims[id(parameter)] = len(shape)
    return ndims


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's local storage: 0 if it has no elements, like the empty shards of FSDP."""
    shard = local_shard(tensor)
    return shard.untyped_storage().data_ptr() if shard.device.type != "meta" and shard.numel() else 0
