"""Listening to three of torch's calls that hooks do not reach: clipping, loss scaling, loading optimizer state.

Each is replaced by a function that calls the original with the same arguments and returns what it returned.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ..facts import StateLoad
from ..introspect.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Of what a script does again and again, the first ones say all there is.
_MOST_NOTED = 64


class Calls:
    """What was called since it began to listen."""

    def __init__(self) -> None:
        self.loads: list[StateLoad] = []
        self.scaler: str | None = None
        self.scaled_steps = 0
        self.steps_taken = 0  # by optimizers, as the observer counts them
        self.skipped = 0
        self._norms: list[tuple[Any, float, frozenset[int]]] = []
        self._restore: list[tuple[Any, str, Any]] = []

    def listen(self) -> None:
        for holder in (torch.nn.utils, clip_grad):
            self._wrap(holder, "clip_grad_norm_", self._clipped)
        self._wrap(Optimizer, "load_state_dict", self._loaded)
        self._wrap(torch.amp.GradScaler, "step", self._scaled)
        self.listen_to_fsdp()

    def listen_to_fsdp(self) -> None:
        """FSDP1 clips by a method of its own; the script may import it at any time."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        fsdp1 = getattr(fsdp, "FullyShardedDataParallel", None)
        if fsdp1 is not None and all(holder is not fsdp1 for holder, _, _ in self._restore):
            self._wrap(fsdp1, "clip_grad_norm_", self._clipped)

    def silence(self) -> None:
        """Put the originals back, except where somebody else has replaced them meanwhile."""
        for holder, name, wrapper in reversed(self._restore):
            if vars(holder).get(name) is wrapper:
                setattr(holder, name, wrapper.__wrapped__)
        self._restore.clear()

    def take_norms(self) -> list[tuple[float, float, frozenset[int]]]:
        """(norm, max_norm, ids of the parameters) of the clips since this was last asked for; no ids, where FSDP1 clips all."""
        norms, self._norms = self._norms, []
        return [(float(norm), max_norm, handed) for norm, max_norm, handed in norms]

    def _wrap(self, holder: Any, name: str, around: Callable[..., Any]) -> None:
        original = vars(holder)[name]

        @functools.wraps(original)
        def wrapper(*args: Any, **options: Any) -> Any:
            return around(original, *args, **options)

        wrapper.__wrapped__ = original
        setattr(holder, name, wrapper)
        self._restore.append((holder, name, wrapper))

    def _clipped(self, original: Any, *args: Any, **options: Any) -> Any:
        handed = args[0] if args else options.get("parameters")
        if isinstance(handed, Iterator):  # it can be gone through only once
            handed = list(handed)
            args, options = ((handed, *args[1:]), options) if args else (args, options | {"parameters": handed})
        norm = original(*args, **options)
        named = dict(zip(("parameters", "max_norm", "norm_type"), args)) | options  # noqa: B905 (the call has more)
        if named.get("norm_type", 2.0) == 2.0 and len(self._norms) < _MOST_NOTED:
            self._norms.append((norm, float(named["max_norm"]), _ids(handed)))
        return norm

    def _scaled(self, original: Any, scaler: Any, *args: Any, **options: Any) -> Any:
        before = self.steps_taken
        result = original(scaler, *args, **options)
        if scaler.is_enabled():
            self.scaler = type(scaler).__name__
            self.scaled_steps += 1
            self.skipped += self.steps_taken == before
        return result

    def _loaded(self, original: Any, optimizer: Any, state_dict: Any, *args: Any, **options: Any) -> Any:
        given = _dtypes(state_dict["state"]) if len(self.loads) < _MOST_NOTED and "state" in state_dict else None
        before = _dtypes(optimizer.state) if given is not None else {}
        result = original(optimizer, state_dict, *args, **options)
        if given is not None:
            held = _dtypes(optimizer.state)
            self.loads.append(StateLoad(optimizer=type(optimizer).__name__, given=given, held=held, before=before))
        return result


def _ids(handed: Any) -> frozenset[int]:
    """Of the parameters that clipping was handed, one or several."""
    if isinstance(handed, torch.Tensor):
        return frozenset({id(handed)})
    return frozenset(map(id, handed)) if isinstance(handed, Collection) else frozenset()


def _dtypes(state: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    """Dtypes of state tensors by name."""
    found: dict[str, set[str]] = {}
    for held in state.values():
        if isinstance(held, dict):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    found.setdefault(str(name), set()).add(dtype_name(value))
    return {name: tuple(sorted(dtypes)) for name, dtypes in found.items()}
