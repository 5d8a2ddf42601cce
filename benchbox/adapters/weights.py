"""Weights of a module that was not written for benchbox, by the names of its own state dict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from benchbox.errors import ConfigurationError, Problem
from benchbox.observer.introspect.names import live_buffers, live_parameters
from benchbox.registry.weights import LoadedWeights, weight_files

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def load_by_name(module: nn.Module, path: Path) -> LoadedWeights:
    """Copy the tensors of safetensors files into the parameters and buffers of the same names.

    Raises:
        ConfigurationError: no tensor has the name of one of the module, or a tensor has another shape.
        DataError: a file is missing or damaged.
    """
    parameters = dict(live_parameters(module))
    tensors = {**parameters, **dict(live_buffers(module))}
    loaded, unexpected = [], []
    with torch.no_grad():
        for file in weight_files(path):
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 (not a mapping)
                    if name not in tensors:
                        unexpected.append(name)
                        continue
                    tensor = stored.get_tensor(name)
                    if tensor.shape != tensors[name].shape:
                        shapes = f"{tuple(tensor.shape)}, and {tuple(tensors[name].shape)} is expected"
                        raise ConfigurationError(Problem(str(file), f"{name} has shape {shapes}"))
                    tensors[name].copy_(tensor)
                    loaded.append(name)
    if not loaded:
        message = f"no tensor has the name of a parameter of {type(module).__name__}"
        raise ConfigurationError(Problem(str(path), message, "convert the weights to the names of its state dict"))
    missing = tuple(name for name in parameters if name not in set(loaded))
    return LoadedWeights(loaded=tuple(loaded), missing=missing, unexpected=tuple(unexpected), fitted={})
