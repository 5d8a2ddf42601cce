"""Everything of a session that a checkpoint contains, as tensors and as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from benchbox.dcp.shards import Shards, full_shards
from benchbox.observer.introspect.masters import detect_compensation
from benchbox.observer.introspect.wrappers import optimizer_chain
from benchbox.trainer.checkpoint import generators

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch.optim import Optimizer

    from benchbox.backends.state import TrainingState
    from benchbox.session import Session

_RNG = "rng/"
# Options of a parameter group that say how an optimizer runs on a device, and not what it computes.
_RUN_OPTIONS = frozenset({"params", "fused", "foreach", "triton", "capturable", "differentiable"})


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def session_state(session: Session) -> TrainingState:
    """Return the state of a session, with the averages of its weights if it keeps any."""
    state = session.backend.training_state()
    if session.averages is None:
        return state
    return replace(state, averages=session.backend.locate_stepped(session.averages.tensors))


def generator_states(device: torch.device) -> dict[str, Shards]:
    """Return the states of this rank's random generators, (bytes,) uint8, by key."""
    return {f"{_RNG}{rank()}/{kind}": full_shards(state) for kind, state in generators.generator_states(device).items()}


def drawn_on(saved: Mapping[str, Any]) -> str:
    """Return the type of the device on which the ranks of a checkpoint drew, `cuda` or `cpu`."""
    return "cuda" if any(key.startswith(_RNG) and key.endswith("/cuda") for key in saved) else "cpu"


def generator_keys(saved: Mapping[str, Any], device: torch.device) -> dict[str, str]:
    """Return the keys of the generators that this rank restores, by kind. More ranks than were saved repeat them in turn."""
    ranks = len({key.split("/")[1] for key in saved if key.startswith(_RNG)})
    keys = {kind: f"{_RNG}{rank() % max(ranks, 1)}/{kind}" for kind in generators.kinds_of(device)}
    return {kind: key for kind, key in keys.items() if key in saved}


def trainer_document(session: Session, state: TrainingState) -> dict[str, Any]:
    """Return what of a session is no tensor, as JSON values."""
    prepared, averages = session.backend.prepared, session.averages
    return {
        "averages": None if averages is None else {"updates": averages.updates},
        "spikes": None if session.spikes is None else session.spikes.state_dict(),
        "schedule": _as_json(prepared.schedule.state_dict()),
        "groups": [_options(group) for group in prepared.stepping.param_groups],
        "compensation": detect_compensation(optimizer_chain(prepared.stepping)[-1], {}),  # that no stored tensor shows
        "parameters": state.entries(),
    }


def restore_document(session: Session, document: Mapping[str, Any]) -> None:
    """Give a session what `trainer_document` has saved, but for the entries of parameters."""
    if session.averages is not None:
        session.averages.updates = document["averages"]["updates"]
    if session.spikes is not None:
        session.spikes.load_state_dict(document["spikes"])
    _set_options(session.backend.prepared.stepping, document["groups"])
    session.backend.prepared.schedule.load_state_dict(document["schedule"])


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _as_json(value) for name, value in group.items() if name not in _RUN_OPTIONS}


def _set_options(optimizer: Optimizer, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the options of parameter groups to saved values, in the types that the optimizer has them in."""
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        for name, value in saved.items():
            if name in group:
                current = group[name]
                if isinstance(current, Tensor):
                    current.fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(current, tuple) else value


def _as_json(value: Any) -> Any:
    """Return a value with tensors of one element as numbers and tuples as lists."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value
