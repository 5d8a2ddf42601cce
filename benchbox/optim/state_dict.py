"""Optimizer state of masters as it is saved: per parameter, without the chunks.

A device with another bucket size splits parameters into other chunks, so a state dict must not depend on them.
"""

from __future__ import annotations

from itertools import chain, count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.optim.chunks import ParameterChunk

ParamGroups = list[dict[str, Any]]


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def pack_groups(groups: ParamGroups) -> ParamGroups:
    """Return parameter groups with indices in place of tensors, as every optimizer saves them."""
    indices = count()
    return [{**group, "params": [next(indices) for _ in group["params"]]} for group in groups]


def pack_state(parameters: Sequence[Sequence[ParameterChunk]], state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Convert the state of masters to state by parameter index. Entries that belong to no tensor are unchanged.

    Args:
        parameters: the chunks of each parameter.
        state: `inner.state`.
    """
    packed = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    for index, chunks in enumerate(parameters):
        chunk_states = [state[chunk.master] for chunk in chunks if chunk.master in state]
        if chunk_states:
            packed[index] = _join_states(chunks, chunk_states)
    return packed


def unpack_state(parameters: Sequence[Sequence[ParameterChunk]], state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Convert state by parameter index to state by chunk index: the inverse of `pack_state`."""
    indices = range(len(parameters))
    unpacked = {key: value for key, value in state.items() if key not in indices}
    pairs = ((index, chunk) for index, chunks in enumerate(parameters) for chunk in chunks)
    return unpacked | {
        chunk_index: _slice_state(chunk, state[index]) for chunk_index, (index, chunk) in enumerate(pairs) if index in state
    }


def _join_states(chunks: Sequence[ParameterChunk], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate elementwise state on the CPU: the copy might not fit into the memory of a device that trains.

    Other state, such as a step count, is equal in all chunks.
    """
    if len(chunks) == 1:
        return dict(states[0])
    chunk_shape, shape = chunks[0].master.shape, chunks[0].parameter.shape
    return {
        name: torch.cat([state[name].cpu() for state in states]).view(shape)
        if isinstance(value, Tensor) and value.shape == chunk_shape
        else value
        for name, value in states[0].items()
    }


def _slice_state(chunk: ParameterChunk, state: dict[str, Any]) -> dict[str, Any]:
    """Copy the state of one chunk, the elementwise tensors to the device of its master.

    Chunks must not share tensors that each of them increments, and no tensor may remain a view of a mapped file.
    """
    shape, device = chunk.parameter.shape, chunk.master.device
    return {
        name: (chunk.select(value).to(device, copy=True) if value.shape == shape else value.clone())
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def check_state_dict(state_dict: Mapping[str, Any], groups: ParamGroups) -> None:
    """Raise an error if a state dict cannot be loaded into these parameter groups.

    Raises:
        KeyError: it has no masters. Deriving them from 16-bit weights would lose the digits they exist to keep.
        ValueError: it belongs to other parameters.
    """
    if "masters" not in state_dict:
        raise KeyError("the optimizer state holds no masters; it was not saved by MasterWeightOptimizer")
    if [len(group["params"]) for group in state_dict["param_groups"]] != [len(group["params"]) for group in groups]:
        raise ValueError("the saved parameter groups have other sizes than those of this optimizer")
    shapes = [tuple(master.shape) for master in state_dict["masters"]]
    if shapes != [tuple(parameter.shape) for parameter in chain.from_iterable(group["params"] for group in groups)]:
        raise ValueError("the saved masters have other shapes than these parameters")
