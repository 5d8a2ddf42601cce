"""Loading of published weights into policies."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from benchbox.errors import ConfigurationError, DataError, Problem
from benchbox.registry.weights import LoadedWeights, weight_files

from .published_names import EMBEDDING, POSITION, TRANSPOSED, VOCABULARY, parameter_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

_DTYPES = ("F64", "F32", "F16", "BF16")  # names of safetensors


def load_published(policy: nn.Module, path: Path, *, predicts_text: bool = True) -> LoadedWeights:
    """Copy published weights into an unwrapped policy.

    The layout is recognised by the names of the tensors: those of `published_names`, or the policy's own parameter names, which
    training saves. A position table of another resolution is resized bilinearly. Of a longer text embedding the first rows are
    copied: PaliGemma's was padded when it was published. No other shape may differ.

    Files may have text embedding and output head as two tensors, which are one parameter here. LeRobot 0.6 trains the first
    and never the second, so that they differ after one step. A policy that predicts no text loads the embedding then, and
    reports it.

    Args:
        policy: unwrapped.
        path: a safetensors file, or a folder of them.
        predicts_text: whether the policy uses the output head.

    Raises:
        ConfigurationError: no tensor belongs to the policy, or a tensor has another shape.
        DataError: a file is missing or damaged, weights are quantised, or tensors differ that are tied here.
        The policy is then unchanged.
    """
    with ExitStack() as stack:
        files = _open_files(path, stack)
        sources = match_tensors(policy, {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}, path)
        _check_dtypes(sources, files, path)
        parameters = dict(policy.named_parameters())
        changes = _separate_heads(sources, files, path, predicts_text=predicts_text)
        with torch.no_grad():
            for parameter_name, (name, *_) in sources.items():
                parameter = parameters[parameter_name]
                tensor, change = fit_tensor(name, files[name].get_tensor(name), parameter_name, parameter)
                parameter.copy_(tensor)
                if change is not None:
                    changes[parameter_name] = "; ".join([*filter(None, [changes.get(parameter_name)]), change])
    used = {name for tied_names in sources.values() for name in tied_names}
    return LoadedWeights(
        loaded=tuple(sources),
        missing=tuple(name for name in parameters if name not in sources),
        unexpected=tuple(name for name in files if name not in used),
        fitted=changes,
    )


def _open_files(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor, by tensor name."""
    files = {}
    for weight_file in weight_files(path):
        file = stack.enter_context(safe_open(weight_file, framework="pt"))
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in files:
                raise DataError(f"{path}: {name} is in two of its files")
            files[name] = file
    return files


def _check_dtypes(sources: Mapping[str, Sequence[str]], files: Mapping[str, Any], path: Path) -> None:
    """Raise DataError for quantised tensors."""
    for names in sources.values():
        for name in names:
            if (dtype := files[name].get_slice(name).get_dtype()) not in _DTYPES:
                raise DataError(f"{path}: {name} is {dtype}, and weights are read in {', '.join(_DTYPES)}")


def _separate_heads(
    sources: dict[str, list[str]], files: Mapping[str, Any], path: Path, *, predicts_text: bool
) -> dict[str, str]:
    """Remove output heads that differ from the text embedding from the sources, and return a note on each.

    Raises:
        DataError: tensors differ that are tied here, and both are used.
    """
    notes = {}
    for parameter_name, names in sources.items():
        first, *others = names
        differing = [name for name in others if not torch.equal(files[name].get_tensor(name), files[first].get_tensor(first))]
        if not differing:
            continue
        embeddings = [name for name in names if name.endswith(EMBEDDING)]
        if predicts_text or len(embeddings) != 1:
            choice = ", or choose a policy or preset that predicts no text" if embeddings else ""
            raise DataError(
                f"{path}: {first} and {differing[0]} differ, and are one tensor here; remove one of them from the file{choice}"
            )
        heads = ", ".join(name for name in names if name not in embeddings)
        sources[parameter_name] = embeddings
        notes[parameter_name] = f"{embeddings[0]}, from which {heads} differs; no text is predicted"
    return notes


def match_tensors(policy: nn.Module, shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, list[str]]:
    """Return, for each parameter that has published tensors, their names: several if they are tied.

    Args:
        policy: unwrapped.
        shapes: of the published tensors, by name.
        path: of the weights, for messages.

    Raises:
        ConfigurationError: no tensor belongs to the policy, or a tensor has another shape.
    """
    parameters, mapping = dict(policy.named_parameters()), parameter_names(shapes)
    sources: dict[str, list[str]] = {}
    for name in shapes:
        parameter_name = name if name in parameters else mapping.get(name)
        if parameter_name in parameters:
            sources.setdefault(parameter_name, []).append(name)
    policy_class = type(policy).__name__
    if not sources:
        examples = ", ".join(sorted(shapes)[:3]) or "it is empty"
        more = ", ..." * (len(shapes) > 3)
        raise ConfigurationError(Problem(str(path), f"none of its tensors belongs to {policy_class}: {examples}{more}"))
    mismatches = []
    for parameter_name, published_names in sources.items():
        parameter = parameters[parameter_name]
        for name in published_names:
            meta = torch.empty(shapes[name], device="meta")
            if fit_tensor(name, meta, parameter_name, parameter)[0].shape != parameter.shape:
                mismatches.append(
                    f"{name} is {_format_shape(meta)}, and {parameter_name} of {policy_class} is {_format_shape(parameter)}"
                )
    if mismatches:
        more = f"; {len(mismatches) - 1} more do not fit" if len(mismatches) > 1 else ""
        raise ConfigurationError(Problem(str(path), mismatches[0] + more))
    return sources


def fit_tensor(name: str, tensor: Tensor, parameter_name: str, parameter: Tensor) -> tuple[Tensor, str | None]:
    """Return a published tensor in the shape of the parameter, if possible, and a description of any lossy change."""
    if name.endswith(TRANSPOSED):
        return tensor.T, None
    if tensor.ndim != 2 or tensor.shape[1] != parameter.shape[-1] or tensor.shape == parameter.shape:
        return tensor, None
    if parameter_name == VOCABULARY and len(tensor) > len(parameter):
        return tensor[: len(parameter)], f"the first {len(parameter)} of {len(tensor)} rows"
    if parameter_name == POSITION and _is_square(len(tensor)) and _is_square(len(parameter)):
        return _resize(tensor, len(parameter)), f"resized bilinearly from {len(tensor)} to {len(parameter)} positions"
    return tensor, None


def _resize(table: Tensor, positions: int) -> Tensor:
    """Resize a table (P, W) of a square grid, in row-major order, to another square grid.

    Antialiased, so that shrinking averages, as `transformers` does for SigLIP 2.
    """
    old_side, new_side = math.isqrt(len(table)), math.isqrt(positions)
    square = table.float().T.unflatten(1, (old_side, old_side))[None]  # (1, W, side, side)
    resized = F.interpolate(square, size=(new_side, new_side), mode="bilinear", align_corners=False, antialias=True)
    return resized[0].flatten(1).T


def _is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number


def _format_shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a scalar"
