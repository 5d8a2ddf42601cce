"""Published weights, into the policies here."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from benchbox.errors import ConfigurationError, DataError, Problem
from benchbox.registry.weights import Loaded, weight_files

from .published_names import POSITION, TRANSPOSED, VOCABULARY, parameter_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

_READ = ("F64", "F32", "F16", "BF16")  # as safetensors calls dtypes


def load_published(policy: nn.Module, path: Path) -> Loaded:
    """Copy published weights into an unwrapped policy. Their layout is known by their names: those of `published_names`, or the
    policy's own, under which training saves it.

    A table of positions of another resolution is resized bilinearly. Of a longer table of text tokens the first rows are taken:
    PaliGemma's was padded when it was published. Nothing else may differ in shape.

    Raises:
        ConfigurationError: nothing has a place in the policy, or something is of another shape.
        DataError: a file is missing or damaged, its numbers are quantised, or tensors that are tied here differ.
        Nothing is changed then.
    """
    with ExitStack() as stack:
        holders = _opened(path, stack)
        sources = place(policy, {name: tuple(holder.get_slice(name).get_shape()) for name, holder in holders.items()}, path)
        _check(sources, holders, path)
        parameters = dict(policy.named_parameters())
        changes = {}
        with torch.no_grad():
            for ours, (name, *_) in sources.items():
                tensor, change = fitted(name, holders[name].get_tensor(name), ours, parameters[ours])
                parameters[ours].copy_(tensor)
                if change is not None:
                    changes[ours] = change
    taken = {name for published in sources.values() for name in published}
    return Loaded(
        loaded=tuple(sources),
        missing=tuple(name for name in parameters if name not in sources),
        unexpected=tuple(name for name in holders if name not in taken),
        fitted=changes,
    )


def _opened(path: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file that holds each tensor."""
    holders = {}
    for file in weight_files(path):
        opened = stack.enter_context(safe_open(file, framework="pt"))
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            if name in holders:
                raise DataError(f"{path}: {name} is in two of its files")
            holders[name] = opened
    return holders


def _check(sources: Mapping[str, Sequence[str]], holders: Mapping[str, Any], path: Path) -> None:
    """Refuse what would be copied and would not mean the same here."""
    for first, *others in sources.values():
        for name in (first, *others):
            if (dtype := holders[name].get_slice(name).get_dtype()) not in _READ:
                raise DataError(f"{path}: {name} is {dtype}, and weights are read in {', '.join(_READ)}")
        for name in others:
            if not torch.equal(holders[name].get_tensor(name), holders[first].get_tensor(first)):
                raise DataError(f"{path}: {first} and {name} differ, and are one tensor here")


def place(policy: nn.Module, shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, list[str]]:
    """Parameters of the policy, and the published tensors of the given shapes that each is to have: several when they are tied.

    Raises:
        ConfigurationError: as `load_published`, for what `path` names.
    """
    parameters, known = dict(policy.named_parameters()), parameter_names(shapes)
    sources: dict[str, list[str]] = {}
    for name in shapes:
        ours = name if name in parameters else known.get(name)
        if ours in parameters:
            sources.setdefault(ours, []).append(name)
    of = type(policy).__name__
    if not sources:
        first = ", ".join(sorted(shapes)[:3]) or "it is empty"
        raise ConfigurationError(Problem(str(path), f"nothing in it is known to {of}: {first}{', ...' * (len(shapes) > 3)}"))
    wrong = []
    for ours, published in sources.items():
        for name in published:
            meta = torch.empty(shapes[name], device="meta")
            if fitted(name, meta, ours, parameters[ours])[0].shape != parameters[ours].shape:
                wrong.append(f"{name} is {_shape(meta)} in it, and {ours} of {of} is {_shape(parameters[ours])}")
    if wrong:
        more = f"; {len(wrong) - 1} more do not fit" if len(wrong) > 1 else ""
        raise ConfigurationError(Problem(str(path), wrong[0] + more))
    return sources


def fitted(name: str, tensor: Tensor, ours: str, parameter: Tensor) -> tuple[Tensor, str | None]:
    """A published tensor as the parameter holds it, where that can be done, and what was done if it lost anything."""
    if name.endswith(TRANSPOSED):
        return tensor.T, None
    there, here = _shape(tensor), _shape(parameter)
    if tensor.ndim != 2 or tensor.shape[1] != parameter.shape[-1] or there == here:
        return tensor, None
    if ours == VOCABULARY and len(tensor) > len(parameter):
        return tensor[: len(parameter)], f"the first {len(parameter)} of {len(tensor)} rows"
    if ours == POSITION and _is_square(len(tensor)) and _is_square(len(parameter)):
        return _resized(tensor, len(parameter)), f"resized bilinearly from {len(tensor)} to {len(parameter)} positions"
    return tensor, None


def _resized(table: Tensor, positions: int) -> Tensor:
    """A table (P, W) of a square of positions, row by row, as one of another square: averaged where it shrinks (antialiased,
    as `transformers` does for SigLIP 2).
    """
    before, after = math.isqrt(len(table)), math.isqrt(positions)
    square = table.float().T.unflatten(1, (before, before))[None]  # (1, W, side, side)
    resized = F.interpolate(square, size=(after, after), mode="bilinear", align_corners=False, antialias=True)
    return resized[0].flatten(1).T


def _is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a scalar"
