"""State of masters as it is saved: that of whole parameters. The pieces they are stepped in leave no trace, for another device
may have others.
"""

from __future__ import annotations

from itertools import chain, count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.optim.chunks import Piece

Groups = list[dict[str, Any]]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def numbered(groups: Groups) -> Groups:
    """Parameter groups that hold numbers in the place of tensors, as every optimizer saves them."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]


def packed_state(parameters: Sequence[Sequence[Piece]], state: Mapping[Any, Any]) -> dict[Any, Any]:
    """From the state of pieces, that of parameters by their number. What is not of any tensor stays as it is."""
    packed = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    for number, pieces in enumerate(parameters):
        held = [state[piece.master] for piece in pieces if piece.master in state]
        if held:
            packed[number] = _joined(pieces, held)
    return packed


def unpacked_state(parameters: Sequence[Sequence[Piece]], state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The reverse: state by the number of the piece."""
    numbers = range(len(parameters))
    unpacked = {key: value for key, value in state.items() if key not in numbers}
    parts = ((number, piece) for number, pieces in enumerate(parameters) for piece in pieces)
    return unpacked | {
        position: _part(piece, state[number]) for position, (number, piece) in enumerate(parts) if number in state
    }


def _joined(pieces: Sequence[Piece], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is by element is put side by side, on the CPU: it is a copy, for which a device that trains need not have the room.
    What is not (a count of steps) is alike in all pieces.
    """
    if len(pieces) == 1:
        return dict(states[0])
    first, shape = pieces[0].master.shape, pieces[0].parameter.shape
    return {
        name: torch.cat([state[name].cpu() for state in states]).view(shape)
        if isinstance(value, Tensor) and value.shape == first
        else value
        for name, value in states[0].items()
    }


def _part(piece: Piece, state: dict[str, Any]) -> dict[str, Any]:
    """Copies: pieces must not share what each of them counts up."""
    shape = piece.parameter.shape
    return {
        name: (piece.part(value) if value.shape == shape else value).clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def check_fits(saved: Mapping[str, Any], groups: Groups) -> None:
    """Raise what keeps a saved state from being loaded into these groups.

    Raises:
        KeyError: it holds no masters. Deriving them from 16-bit weights would lose what they exist to keep.
        ValueError: it is of other parameters.
    """
    if "masters" not in saved:
        raise KeyError("the optimizer state holds no masters; it was not saved by MasterWeightOptimizer")
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group["params"]) for group in groups]:
        raise ValueError("the saved parameter groups are of other sizes than those of this optimizer")
    found = [tuple(master.shape) for master in saved["masters"]]
    if found != [tuple(parameter.shape) for parameter in chain.from_iterable(group["params"] for group in groups)]:
        raise ValueError("the saved masters have other shapes than these parameters")
