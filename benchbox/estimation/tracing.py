"""Trace of forward and backward: every activation that is born and dies, and when which gradient is complete.

On fake tensors, which need no memory, or on real ones, which take less time where a policy is small.

Nothing is derived from the architecture of a policy: the operations that would run are dispatched, autograd saves what it
would save, checkpointing recomputes what it would recompute, and storages are counted as they are while a step is probed
(`benchbox.measure.memory.TensorStorageTracker`). Any adapted policy is traced alike.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchbox.estimation.module_uses import ModuleUses
from benchbox.measure.flops import FlopCounter
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import in_backward
from benchbox.theory.structure import Event, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchbox.registry.contracts import Batch
    from benchbox.theory.structure import EventKind


class _Recorder(TorchDispatchMode):
    """Records the births and deaths of storages. Beside fake tensors, operations on real tensors alone run for real."""

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.collectives, self.flops = CollectiveCounter(), FlopCounter()
        self.products: list[tuple[int, weakref.ref[Any]]] = []  # bytes and storage of the results of matrix products
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._known = {storage._cdata: storage for tensor in known if (storage := tensor.untyped_storage())}  # noqa: SLF001
        self._relevant: dict[Any, tuple[bool, bool]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(tensor, FakeTensor) for tensor in list_tensors((*args, *kwargs.values()))):
            result = func(*args, **kwargs)
        else:
            with _disable_current_modes():
                result = func(*args, **kwargs)
        counts_collective, counts_flops = self._relevance(func)
        if counts_collective:
            self.collectives.on_operation(func, args, kwargs, result)
        if counts_flops:
            self.flops.on_operation(func, args, kwargs, result)
        for tensor in list_tensors((result,)):
            self._count(tensor, is_product=counts_flops)
        return result

    def _relevance(self, func: Any) -> tuple[bool, bool]:
        if func not in self._relevant:
            self._relevant[func] = self.collectives.is_relevant(func), self.flops.is_relevant(func)
        return self._relevant[func]

    def _count(self, tensor: Tensor, *, is_product: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 (the storage's identity)
        if key in self._live or key in self._known or not size:
            return
        reference = weakref.ref(storage, lambda _: self._free(key))
        self._live[key] = (size, reference)
        self.events.append(Event("allocate", size))
        if is_product and not in_backward():
            self.products.append((size, reference))

    def _free(self, key: int) -> None:
        if key in self._live:
            self.events.append(Event("free", self._live.pop(key)[0]))

    def record(self, kind: EventKind, name: str = "") -> None:
        """Record an event of a module."""
        self.events.append(Event(kind, name=name))

    def complete_gradient(self, number: int, gradient: Tensor) -> None:
        """Record that a gradient is complete. Where it is kept is the backend's business, so it is no activation any more."""
        self._free(gradient.untyped_storage()._cdata)  # noqa: SLF001
        self.events.append(Event("gradient", number))

    def largest_kept_product(self) -> int:
        """Return the bytes of the largest result of a matrix product that still lives."""
        return max((size for size, reference in self.products if reference() is not None), default=0)


def list_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation, also inside of tuples, lists and dictionaries."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += list_tensors(value)
        elif isinstance(value, dict):
            tensors += list_tensors(value.values())
    return tensors


def trace_step(
    policy: nn.Module,
    batch: Batch,
    mode: FakeTensorMode | nullcontext[None],
    *,
    units: Mapping[nn.Module, str],
    autocast: torch.dtype | None,
    uses: Mapping[nn.Module, str] | None = None,
) -> Timeline:
    """Trace forward and backward of one micro-batch.

    Args:
        policy: on fake tensors of `mode`, or on real ones without it, in the dtypes in which it computes.
        batch: real, or fake where it is large and the policy is.
        units: name of each sharded module.
        autocast: dtype of autocast, if the recipe has it.
        uses: name of every module for a trace of their uses.
    """
    recorder = _Recorder([*policy.parameters(), *policy.buffers(), *batch.values()])
    numbers = {parameter: number for number, parameter in enumerate(policy.parameters())}
    module_uses = ModuleUses(uses or {}, numbers, recorder.record)
    with ExitStack() as stack:
        for parameter, number in numbers.items():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(
                    lambda parameter, number=number: recorder.complete_gradient(number, parameter.grad)
                )
                stack.callback(handle.remove)
        stack.enter_context(_unit_events(recorder, units))
        stack.enter_context(module_uses.recording())
        stack.enter_context(mode)
        stack.enter_context(recorder)
        with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
            losses = policy(batch)
        recorder.record("forward_end")
        logits = recorder.largest_kept_product()
        losses.total.backward()
    events = tuple(recorder.events)
    for parameter in numbers:
        parameter.grad = None
    collectives = {name: (entry["count"], entry["bytes"]) for name, entry in recorder.collectives.counts.items()}
    flops = recorder.flops
    return Timeline(
        events=events,
        model_flops=flops.total - flops.recomputed,
        recomputed_flops=flops.recomputed,
        collectives=collectives,
        logits_bytes=logits,
        external=module_uses.external,
    )


@contextmanager
def _unit_events(recorder: _Recorder, units: Mapping[nn.Module, str]) -> Iterator[None]:
    """Record where units are entered and left: hooks as those of FSDP, on modules and on the tensors that they return."""
    handles: list[Any] = []

    def enter(name: str, *_: Any) -> None:
        recorder.record("enter_again" if in_backward() else "enter", name)

    def leave(name: str, result: Any) -> None:
        if in_backward():
            return
        recorder.record("leave", name)
        seen: list[bool] = []

        def begin_backward(_: Tensor) -> None:
            if not seen:
                seen.append(True)
                recorder.record("enter_backward", name)

        for tensor in list_tensors((result,)):
            if tensor.requires_grad:
                tensor.register_hook(begin_backward)

    for module, name in units.items():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        handles.append(module.register_forward_hook(lambda _module, _arguments, result, name=name: leave(name, result)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
