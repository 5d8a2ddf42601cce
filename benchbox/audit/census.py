"""Takes the census of one step: what is really stored and stepped, read from the live objects.

The innermost torch optimizer is met inside its own step, by torch's global optimizer hooks. Only there is everything present:
ZeRO frees its gradients right after, ZeRO-3 fills its parameter groups only for the call, and accessors that report float32
whatever they hold are never asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchbox.audit.facts import Census, CensusEntry, Opaque, SteppedTensor
from benchbox.audit.walk import (
    compensation,
    dtype_name,
    is_known,
    is_wrapper,
    live_parameters,
    local,
    master_names,
    partitions,
)
from benchbox.measure.witness.setup import optimizer_chain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from torch.optim import Optimizer


class _Size(NamedTuple):
    dtype: str
    device: str
    elements: int
    bytes: int


class CensusTaker:
    """Takes the census of the step that runs inside it.

        taker = CensusTaker(model, optimizer)
        with taker:
            session.step(...)
        findings = run_rules([taker.census])

    `model` is the wrapped model and `optimizer` the outermost optimizer, as the backend prepared them.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._chain = optimizer_chain(optimizer)
        self._live = {id(parameter): name for name, parameter in live_parameters(model)}
        self._names = {id(tensor): name for name, tensor in partitions(self._chain)} | master_names(self._chain, self._live)
        self._live_storages: set[int] = set()
        self._sizes: dict[tuple[str, int], _Size] = {}  # by kind and the id of the tensor it belongs to
        self._with_gradient: set[int] = set()
        self._stepped: dict[int, SteppedTensor] = {}
        self._met: dict[int, Optimizer] = {}
        self._census: Census | None = None

    @property
    def census(self) -> Census:
        """What was found, once the step is over."""
        assert self._census is not None, "the census is that of a step inside the with block"
        return self._census

    def __enter__(self) -> Self:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None:
            self._finish()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if is_wrapper(optimizer):
            return
        if not self._met:
            self._count_model()
        self._met[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._with_gradient.add(id(tensor))
                    self._count("gradient" if self._is_live(tensor) else "master_gradient", tensor, tensor.grad)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in self._met:
            return
        for group in optimizer.param_groups:
            for index, tensor in enumerate(group["params"]):
                if id(tensor) in self._with_gradient:
                    self._note_stepped(optimizer, group, tensor, f"{type(optimizer).__name__} parameter {index}")

    def _note_stepped(self, optimizer: Optimizer, group: Mapping[str, Any], tensor: Tensor, otherwise: str) -> None:
        state = optimizer.state.get(tensor, {})
        held = local(tensor)
        self._stepped[id(tensor)] = SteppedTensor(
            name=self._live.get(id(tensor)) or self._names.get(id(tensor), otherwise),
            optimizer=type(optimizer).__name__,
            dtype=dtype_name(held),
            device=str(held.device),
            elements=held.numel(),
            live=self._is_live(tensor),
            betas=tuple(group["betas"]) if "betas" in group else None,
            state={name: dtype_name(value) for name, value in state.items() if isinstance(value, Tensor)},
            compensation=compensation(optimizer, state),
        )
        self._count_held(tensor, state)

    def _count_model(self) -> None:
        for _, parameter in live_parameters(self._model):
            self._live_storages.add(local(parameter).untyped_storage().data_ptr())
            self._count("parameter", parameter, parameter)
            if parameter.grad is not None:
                self._count("gradient", parameter, parameter.grad)
        self._live_storages.discard(0)  # empty shards all "share" the null pointer
        for buffer in self._model.buffers():
            self._count("buffer", buffer, buffer)

    def _count_held(self, tensor: Tensor, state: Mapping[str, Any]) -> None:
        if not self._is_live(tensor):
            self._count("master", tensor, tensor)
        for name, value in state.items():
            if isinstance(value, Tensor):
                self._count(name, tensor, value)

    def _count(self, kind: str, owner: Tensor, tensor: Tensor) -> None:
        held = local(tensor)
        size = _Size(dtype_name(held), str(held.device), held.numel(), held.numel() * held.element_size())
        self._sizes[kind, id(owner)] = size

    def _is_live(self, tensor: Tensor) -> bool:
        return id(tensor) in self._live or local(tensor).untyped_storage().data_ptr() in self._live_storages

    def _finish(self) -> None:
        """Add what no step touched (partitions and state may be held without having been stepped), and sum up."""
        if not self._met:
            self._count_model()
        for _, tensor in partitions(self._chain):
            self._count_held(tensor, {})
        for optimizer in self._met.values():
            for tensor, state in optimizer.state.items():
                self._count_held(tensor, state)
        self._census = Census(
            rank=(rank := dist.get_rank() if dist.is_initialized() else 0),
            optimizer_chain=tuple(type(optimizer).__name__ for optimizer in self._chain),
            entries=self._entries(rank),
            stepped=tuple(self._stepped.values()),
            opaque=tuple(self._opaque()),
        )

    def _entries(self, rank: int) -> tuple[CensusEntry, ...]:
        sums: dict[tuple[str, str, str], list[int]] = {}
        for (kind, _), size in self._sizes.items():
            total = sums.setdefault((kind, size.dtype, size.device), [0, 0, 0])
            for place, amount in enumerate((1, size.elements, size.bytes)):
                total[place] += amount
        return tuple(
            CensusEntry(rank=rank, kind=kind, dtype=dtype, device=device, tensors=tensors, elements=elements, bytes=size)
            for (kind, dtype, device), (tensors, elements, size) in sums.items()
        )

    def _opaque(self) -> list[Opaque]:
        found = []
        innermost = self._chain[-1] if self._chain else None
        if id(innermost) not in self._met:
            found.append(Opaque(optimizer=type(innermost).__name__, reason="it made no step that torch's optimizer hooks saw"))
        for optimizer in self._met.values():
            tensors = [tensor for tensor in self._stepped.values() if tensor.optimizer == type(optimizer).__name__]
            if not is_known(optimizer) and not all(tensor.compensation for tensor in tensors):
                reason = "its arithmetic is unknown: it may hold masters or compensate rounding where nobody can see"
                found.append(Opaque(optimizer=type(optimizer).__name__, reason=reason))
        return found
