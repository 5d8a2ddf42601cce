"""Which weights an optimizer stepped: by name where its state dictionary has names, else by shape and order."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from benchbox.audit.subjects.checkpoint.numbers import nearest_candidate
from benchbox.audit.subjects.checkpoint.optimizers import optimizer_kind
from benchbox.audit.subjects.checkpoint.stored import UNKNOWN, StoredArray, ElementRange, StoredSteppedTensor, is_buffer
from benchbox.observer.introspect.names import own_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.audit.subjects.checkpoint.optimizers import ParameterState

_FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})


def link_weights(
    optimizer: Sequence[ParameterState], model: Mapping[str, StoredArray], *, in_order: bool
) -> list[StoredSteppedTensor]:
    """What an optimizer stepped.

    Args:
        model: the weights that lie beside it.
        in_order: whether they are in the order of the model. safetensors sorts them by name.
    """
    kind = optimizer_kind(optimizer)
    by_name = {saved.key: saved.name for saved in optimizer if saved.name is not None}
    names = {key: own_name(name) for key, name in by_name.items() if own_name(name) in model}
    taken = set(names.values())
    rest = {name: tensor for name, tensor in model.items() if name not in taken and not is_buffer(name)}
    found = {
        saved.key: _named(saved, names[saved.key], model[names[saved.key]], kind) for saved in optimizer if saved.key in names
    }
    found |= _by_shape([saved for saved in optimizer if saved.key not in names], rest, kind, in_order=in_order)
    return [found[saved.key] for saved in optimizer]


def _named(
    saved: ParameterState, name: str, weight: StoredArray, kind: str, *, state_is_own: bool = True
) -> StoredSteppedTensor:
    is_master = saved.master is not None
    return StoredSteppedTensor(
        name=name,
        optimizer=kind,
        dtype=saved.master.dtype if saved.master is not None else weight.dtype,
        weight=saved.master if saved.master is not None else weight,
        state=saved.state,
        options=saved.options,
        step_count=saved.step_count,
        is_master=is_master,
        live=ElementRange(held=weight, start=0, stop=weight.elements) if is_master else None,
        live_dtype=weight.dtype,
        ndim=weight.ndim,
        state_is_own=state_is_own,
    )


def _by_shape(
    optimizer: Sequence[ParameterState], model: Mapping[str, StoredArray], kind: str, *, in_order: bool
) -> dict[int | str, StoredSteppedTensor]:
    """Numbered parameters, those of one shape together."""
    weights: dict[tuple[int, ...], dict[str, StoredArray]] = defaultdict(dict)
    for name, tensor in model.items():
        if _is_weight(tensor):
            weights[tensor.shape][name] = tensor
    alike: dict[tuple[int, ...] | None, list[ParameterState]] = defaultdict(list)
    for saved in optimizer:
        alike[saved.shape].append(saved)
    found: dict[int | str, StoredSteppedTensor] = {}
    for shape, members in alike.items():
        # Where nothing tells a shape (an optimizer that keeps no state, a parameter that never had a gradient) it can be any.
        candidates = (
            weights.get(shape, {}) if shape is not None else {name: each for name, each in model.items() if _is_weight(each)}
        )
        own = len(members) == 1 or (in_order and len({saved.group for saved in members}) == 1)
        if all(saved.master is not None for saved in members):
            found |= _by_value(members, candidates, kind)
        elif len(candidates) == len(members) and (own or _interchangeable(members)):
            for saved, (name, weight) in zip(members, candidates.items(), strict=True):
                found[saved.key] = _named(saved, name, weight, kind, state_is_own=own)
        else:
            found |= {saved.key: _unlinked(saved, candidates, kind) for saved in members}
    return found


def _is_weight(tensor: StoredArray) -> bool:
    return tensor.dtype in _FLOATING


def _interchangeable(members: Sequence[ParameterState]) -> bool:
    """Whether nothing but the numbers in their state tells these from one another."""
    first = members[0]
    dtypes = {name: value.dtype for name, value in first.state.items()}
    return all(
        saved.options == first.options
        and saved.step_count == first.step_count
        and {name: value.dtype for name, value in saved.state.items()} == dtypes
        for saved in members[1:]
    )


def _by_value(
    members: Sequence[ParameterState], candidates: Mapping[str, StoredArray], kind: str
) -> dict[int | str, StoredSteppedTensor]:
    """A master belongs to the weight that it rounds to. One that rounds to none differs from all, whichever is its own: the
    nearest is shown.
    """
    found: dict[int | str, StoredSteppedTensor] = {}
    free = dict(candidates)
    for saved in members:
        assert saved.master is not None
        name, share = nearest_candidate(saved.master, free)
        if share == 0.0:
            found[saved.key] = _named(saved, name, free.pop(name), kind)
    stale = [saved for saved in members if saved.key not in found]
    for saved in stale:
        assert saved.master is not None
        name, share = nearest_candidate(saved.master, free)
        known = len(stale) == len(free)  # what is left is theirs
        shown = name if known and len(stale) == 1 else f"master {saved.key}"
        found[saved.key] = _named(saved, shown, free[name], kind) if known else _unlinked(saved, {}, kind)
    return found


def _unlinked(saved: ParameterState, candidates: Mapping[str, StoredArray], kind: str) -> StoredSteppedTensor:
    """Of this one only what it can be is known; its dtype, if that is the same for all of them."""
    dtypes = {weight.dtype for weight in candidates.values()}
    master = saved.master
    return StoredSteppedTensor(
        name=f"parameter {saved.key}" if isinstance(saved.key, int) else saved.key,
        optimizer=kind,
        dtype=master.dtype if master is not None else (dtypes.pop() if len(dtypes) == 1 else UNKNOWN),
        weight=master,
        among=tuple(candidates.values()),
        state=saved.state,
        options=saved.options,
        step_count=saved.step_count,
        is_master=master is not None,
        ndim=None if saved.shape is None else len(saved.shape),
    )
