"""Optimizer state dictionaries, as torch's `state_dict` shapes them: state by number, options by group."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchbox.audit.subjects.checkpoint.stored import StoredTensor, is_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)


def is_model(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(held, Tensor) for held in value.values())


def by_number(optimizer: Mapping[str, Any]) -> Iterator[tuple[int | str, Mapping[str, Any], Mapping[str, Any]]]:
    """(number or name, state, options) of every parameter of an optimizer's state dictionary."""
    for group in optimizer["param_groups"]:
        options = {name: value for name, value in group.items() if name != "params"}
        for number in group.get("params", ()):
            yield number, optimizer["state"].get(number, optimizer["state"].get(str(number), {})), options


def stepped_by(optimizer: Mapping[str, Any], model: Mapping[str, Tensor]) -> list[StoredTensor]:
    """What an optimizer stepped, with the weights of the model beside it.

    A state dictionary numbers parameters and a model names them, and nothing links the two but their order and their shapes.
    Each number gets the next weight of its shape; where several weights have it, the name stays a number.
    """
    found = list(by_number(optimizer))
    masters: Sequence[Tensor] = optimizer.get("masters", ())
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, tensor in model.items():
        if not is_buffer(name):
            by_shape[tuple(tensor.shape)].append(name)
    ambiguous = {shape for shape, names in by_shape.items() if len(names) > 1}
    stepped = []
    for place, (number, state, options) in enumerate(found):
        weight: Tensor | None
        if isinstance(number, str) and number in model:
            name, weight = number, model[number]
        else:
            shape = _shape(state, masters[place] if place < len(masters) else None)
            names = by_shape.get(shape, []) if shape is not None else []
            weight = model[names.pop(0)] if names else None
            unique = weight is not None and shape not in ambiguous
            name = next(key for key, held in model.items() if held is weight) if unique else f"parameter {number}"
        master = masters[place] if place < len(masters) else None
        stepped.append(
            StoredTensor(
                name=name,
                weight=weight if master is None else master,
                live=None if master is None or master is weight else weight,
                state=state,
                options=options,
            )
        )
    return stepped


def _shape(state: Mapping[str, Any], master: Tensor | None) -> tuple[int, ...] | None:
    tensors = [value for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
    held = master if master is not None else next(iter(tensors), None)
    return None if held is None else tuple(held.shape)
