"""Parameters of wrapped models: their names before wrapping, their unsharded shapes and their storages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from .tensors import has_class_named, has_shape, local_shard
from .wrappers import fsdp1_handles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

# Parts that wrappers add to parameter names. Without them the names are those of the unwrapped model.
_RESERVED_PARTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_WRAPPER_PARTS = _RESERVED_PARTS | {"module"}
# Classes whose child `module` is the model that they wrap, as the only child of a model is. Elsewhere it is part of the model.
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "AdaptedPolicy")


def unwrapped_name(wrapped_name: str) -> str:
    """Return the name that a parameter has in the unwrapped model, from its name alone.

    A part `module` is taken for a wrapper. Where the model is at hand, `unwrapped_modules` knows better.
    """
    return ".".join(part for part in wrapped_name.split(".") if part not in _WRAPPER_PARTS)


def unwrapped_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of a wrapped model once, wrappers included, with its name in the unwrapped model: "" for the model."""
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in visited:
            return
        visited.add(module)
        yield name, module
        wraps = has_class_named(module, *_WRAPPERS) or (not name and list(module._modules.keys()) == ["module"])  # noqa: SLF001
        for part, child in module._modules.items():  # noqa: SLF001 (named_children skips repeated modules)
            if child is not None:
                is_wrapped = part in _RESERVED_PARTS or (wraps and part == "module")
                yield from visit(child, name if is_wrapped else f"{name}.{part}" if name else part)

    return visit(model, "")


def live_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a wrapped model once, with the names they had before it was wrapped."""
    yield from _tensors(model, "_parameters")


def live_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a wrapped model once, with the names they had before it was wrapped."""
    yield from _tensors(model, "_buffers")


def owned_tensors(model: nn.Module, kind: Literal["_parameters", "_buffers"]) -> Iterator[tuple[str, Any, nn.Module]]:
    """Yield (name before wrapping, tensor, module) for each parameter or buffer that a module of a wrapped model has.

    Those of a lazy module that was never called are left out.
    """
    for prefix, module in unwrapped_modules(model):
        for name, tensor in getattr(module, kind).items():
            if tensor is not None and has_shape(tensor):
                yield (f"{prefix}.{name}" if prefix else name), tensor, module


def _tensors(model: nn.Module, kind: Literal["_parameters", "_buffers"]) -> Iterator[tuple[str, Any]]:
    yielded: set[int] = set()
    for name, tensor, _ in owned_tensors(model, kind):
        if id(tensor) not in yielded:
            yielded.add(id(tensor))
            yield name, tensor


def parameter_ndims(model: nn.Module) -> dict[int, int]:
    """Return the number of unsharded dimensions of each parameter, by the id of the parameter. Unknown ones are left out.

    FSDP1 leaves a rank with flat shards and ZeRO-3 with empty tensors; both keep the original shapes.
    """
    parameters = [parameter for _, parameter in live_parameters(model) if not has_class_named(parameter, "FlatParameter")]
    ndims = {id(parameter): len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in parameters}
    for handle in fsdp1_handles(model):
        flat = handle.flat_param
        for parameter, shape in zip(getattr(flat, "_params", None) or (), flat._shapes, strict=False):  # noqa: SLF001
            ndims[id(parameter)] = len(shape)
    return ndims


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's local storage: 0 if it has no elements, like the empty shards of FSDP."""
    shard = local_shard(tensor)
    return shard.untyped_storage().data_ptr() if shard.device.type != "meta" and shard.numel() else 0
