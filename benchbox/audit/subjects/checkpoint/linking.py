"""Link an optimizer's parameters to the weights of the model: by name where its state dictionary has names, else by shape and
order.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from benchbox.audit.subjects.checkpoint.numbers import nearest_candidate
from benchbox.audit.subjects.checkpoint.optimizers import optimizer_kind
from benchbox.audit.subjects.checkpoint.stored import UNKNOWN, ElementRange, StoredArray, StoredSteppedTensor, is_buffer_name
from benchbox.observer.facts import SIXTEEN_BIT
from benchbox.observer.introspect.names import unwrapped_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.audit.subjects.checkpoint.optimizers import ParameterState

_WIDE = frozenset({"float64", "float32"})
_FLOATING = _WIDE | SIXTEEN_BIT


def link_weights(
    optimizer: Sequence[ParameterState], model: Mapping[str, StoredArray], *, in_order: bool
) -> list[StoredSteppedTensor]:
    """Return the tensors that an optimizer stepped, with the weights they are or stand for.

    Args:
        optimizer: its parameters.
        model: the weights of the same checkpoint.
        in_order: whether the weights are in the order of the model. safetensors sorts them by name.
    """
    kind = optimizer_kind(optimizer)
    stored_names = {parameter.key: unwrapped_name(parameter.name) for parameter in optimizer if parameter.name is not None}
    names = {key: name for key, name in stored_names.items() if name in model}
    linked_names = set(names.values())
    unlinked = {name: array for name, array in model.items() if name not in linked_names and not is_buffer_name(name)}
    linked = {
        parameter.key: _linked_tensor(parameter, names[parameter.key], model[names[parameter.key]], kind)
        for parameter in optimizer
        if parameter.key in names
    }
    unnamed = [parameter for parameter in optimizer if parameter.key not in names]
    linked |= _link_by_shape(unnamed, unlinked, kind, in_order=in_order)
    return [linked[parameter.key] for parameter in optimizer]


def _linked_tensor(
    parameter: ParameterState, name: str, weight: StoredArray, kind: str, *, state_is_matched: bool = True
) -> StoredSteppedTensor:
    master = parameter.master
    stepped = master if master is not None else weight
    # What was stepped was in float32: the weight is a copy of it, rounded when it was saved or by a library that kept a master.
    is_copy = master is None and weight.dtype in SIXTEEN_BIT and parameter.state_dtype in _WIDE and not parameter.compensation
    return StoredSteppedTensor(
        name=name,
        optimizer=kind,
        dtype=UNKNOWN if is_copy else stepped.dtype,
        weight=None if is_copy else stepped,
        shape=weight.shape,
        state=parameter.state,
        options=parameter.options,
        step_count=parameter.step_count,
        is_master=master is not None,
        live=ElementRange(array=weight, start=0, stop=weight.elements) if master is not None else None,
        live_dtype=weight.dtype,
        ndim=weight.ndim,
        state_is_matched=state_is_matched,
    )


def _link_by_shape(
    optimizer: Sequence[ParameterState], model: Mapping[str, StoredArray], kind: str, *, in_order: bool
) -> dict[int | str, StoredSteppedTensor]:
    """Link numbered parameters, those of one shape together, and of one dtype where their state tells it."""
    weights = {name: array for name, array in model.items() if array.dtype in _FLOATING}
    weights_by_shape: dict[tuple[int, ...], dict[str, StoredArray]] = defaultdict(dict)
    for name, array in weights.items():
        weights_by_shape[array.shape][name] = array
    groups: dict[tuple[tuple[int, ...] | None, str | None], list[ParameterState]] = defaultdict(list)
    for parameter in optimizer:
        groups[parameter.shape, parameter.state_dtype].append(parameter)
    linked: dict[int | str, StoredSteppedTensor] = {}
    for (shape, dtype), parameters in sorted(groups.items(), key=lambda item: item[0][0] is None):
        # A parameter of unknown shape (its optimizer keeps no state, or it never had a gradient) can be any other weight.
        candidates = weights if shape is None else weights_by_shape.get(shape, {})
        candidates = {name: array for name, array in candidates.items() if array.dtype == dtype} or candidates
        matched = len(parameters) == 1 or (in_order and len({parameter.group for parameter in parameters}) == 1)
        if all(parameter.master is not None for parameter in parameters):
            linked |= _link_by_value(parameters, candidates, kind)
        elif len(candidates) == len(parameters) and (matched or _are_interchangeable(parameters)):
            for parameter, (name, weight) in zip(parameters, candidates.items(), strict=True):
                linked[parameter.key] = _linked_tensor(parameter, name, weight, kind, state_is_matched=matched)
        else:
            linked |= {parameter.key: _unlinked_tensor(parameter, candidates, kind) for parameter in parameters}
        if len(candidates) == len(parameters):
            weights = {name: array for name, array in weights.items() if name not in candidates}
    return linked


def _are_interchangeable(parameters: Sequence[ParameterState]) -> bool:
    """Return whether these parameters differ in nothing but the values of their state."""
    reference = parameters[0]
    dtypes = {name: array.dtype for name, array in reference.state.items()}
    return all(
        parameter.options == reference.options
        and parameter.step_count == reference.step_count
        and {name: array.dtype for name, array in parameter.state.items()} == dtypes
        for parameter in parameters[1:]
    )


def _link_by_value(
    parameters: Sequence[ParameterState], candidates: Mapping[str, StoredArray], kind: str
) -> dict[int | str, StoredSteppedTensor]:
    """Link each master to the weight that it rounds to. One that rounds to no weight differs from the right one, whichever that
    is: it is compared with the nearest.
    """
    linked: dict[int | str, StoredSteppedTensor] = {}
    unlinked = dict(candidates)
    for parameter in parameters:
        assert parameter.master is not None
        name, share = nearest_candidate(parameter.master, unlinked)
        if share == 0.0:
            linked[parameter.key] = _linked_tensor(parameter, name, unlinked.pop(name), kind)
    stale = [parameter for parameter in parameters if parameter.key not in linked]
    as_many_weights = len(stale) == len(unlinked)  # the remaining weights belong to the remaining masters
    for parameter in stale:
        assert parameter.master is not None
        if as_many_weights:
            nearest, _ = nearest_candidate(parameter.master, unlinked)
            name = nearest if len(stale) == 1 else f"master {parameter.key}"
            linked[parameter.key] = _linked_tensor(parameter, name, unlinked[nearest], kind)
        else:
            linked[parameter.key] = _unlinked_tensor(parameter, {}, kind)
    return linked


def _unlinked_tensor(parameter: ParameterState, candidates: Mapping[str, StoredArray], kind: str) -> StoredSteppedTensor:
    """Return a tensor of which only the candidates are known, and its dtype if all of them have the same."""
    dtypes = {weight.dtype for weight in candidates.values()}
    if parameter.state_dtype in _WIDE and dtypes <= SIXTEEN_BIT:
        dtypes = set()
    master = parameter.master
    return StoredSteppedTensor(
        name=f"parameter {parameter.key}" if isinstance(parameter.key, int) else parameter.key,
        optimizer=kind,
        dtype=master.dtype if master is not None else (dtypes.pop() if len(dtypes) == 1 else UNKNOWN),
        weight=master,
        candidates=tuple(candidates.values()),
        shape=parameter.shape,
        state=parameter.state,
        options=parameter.options,
        step_count=parameter.step_count,
        is_master=master is not None,
        ndim=None if parameter.shape is None else len(parameter.shape),
    )
