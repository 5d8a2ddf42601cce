"""Dtypes of a module that was not written for benchbox: inputs follow the weights, buffers stay as they are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def cast_inputs_to_weights(module: nn.Module) -> None:
    """Let every part of a module that has floating-point parameters of its own cast its inputs to their dtype.

    The dtype is that of the live parameters when the part is called: under FSDP the one they are gathered in, whatever the
    recipe. What is computed between such parts, such as rotary or time embeddings from float32 buffers, keeps its precision.
    Autocast chooses dtypes by itself, and is left alone.

    Batch norms compute in float32, as FSDP1 makes them, because their running statistics stay float32.
    """
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and part.affine:
            part.forward = partial(_batch_norm, part)  # type: ignore[method-assign]
        elif (weight := _first_weight(part)) is not None:
            part.register_forward_pre_hook(partial(_cast_inputs, weight), with_kwargs=True)


def cast_buffers_to_inputs(module: nn.Module, names: Collection[str]) -> None:
    """Let the buffers of these names follow the dtype of the inputs of the part that has them.

    Args:
        names: last parts of names, such as `pos_grid`.

    Raises:
        ConfigurationError: the module has no such floating-point buffer.
    """
    buffers = [key for key, buffer in inexact_buffers(module).items() if not buffer.is_complex()]
    for missing in set(names) - {name for _, name in buffers}:
        buffer_names = ", ".join(sorted({name for _, name in buffers})) or "there is none"
        problem = f"{type(module).__name__} has no floating-point buffer {missing!r}"
        raise ConfigurationError(Problem("adapt(cast_buffers=...)", problem, buffer_names))
    for part, name in buffers:
        if name in names:
            part.register_forward_pre_hook(partial(_cast_buffer, name), with_kwargs=True)


def keep_buffers(buffers: Mapping[tuple[nn.Module, str], Tensor]) -> None:
    """Undo a cast of buffers, but not their move to another device.

    Args:
        buffers: from `inexact_buffers`, taken before the cast.
    """
    for (part, name), buffer in buffers.items():
        moved = part._buffers[name]  # noqa: SLF001 (the one place with non-persistent buffers)
        if moved is not None and moved.dtype != buffer.dtype:
            part._buffers[name] = buffer.to(moved.device)  # noqa: SLF001


def inexact_buffers(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return all floating-point and complex buffers of a module by their owner and name, non-persistent ones too.

    `nn.Module.to` casts both, complex ones to real numbers.
    """
    return {
        (part, name): buffer
        for part in module.modules()
        for name, buffer in part._buffers.items()  # noqa: SLF001
        if buffer is not None and (buffer.is_floating_point() or buffer.is_complex())
    }


def _cast_inputs(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = getattr(module, name)  # FSDP1 puts a plain tensor in the place of the parameter
    if weight.device.type != "meta" and torch.is_autocast_enabled(weight.device.type):
        return args, kwargs
    return tuple(_cast(arg, weight.dtype) for arg in args), {name: _cast(arg, weight.dtype) for name, arg in kwargs.items()}


def _cast_buffer(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point())
    dtype = next((value.dtype for value in inputs), None)
    if dtype is not None and getattr(module, name).dtype != dtype:
        setattr(module, name, getattr(module, name).to(dtype))


def _batch_norm(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, x: Tensor) -> Tensor:
    """Compute as `norm.forward` does, in float32; the result has the dtype of the input."""
    norm._check_input_dim(x)  # noqa: SLF001
    updates = norm.training and norm.track_running_stats
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if updates and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # the mean of all batches
            momentum = 1.0 / float(norm.num_batches_tracked)
    statistics = (norm.running_mean, norm.running_var) if updates or not norm.training else (None, None)
    by_batch = norm.training or norm.running_mean is None
    weight, bias = norm.weight.float(), norm.bias.float()
    return F.batch_norm(x.float(), *statistics, weight, bias, by_batch, momentum, norm.eps).to(x.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _first_weight(module: nn.Module) -> str | None:
    """Return the name of the first floating-point parameter that a module has directly."""
    parameters = module.named_parameters(recurse=False)
    return next((name for name, parameter in parameters if parameter.is_floating_point()), None)
