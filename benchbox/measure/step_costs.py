"""Costs of one step by phase: FLOPs by tower, dtype and class of shape, bytes of operations, bytes of collectives."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from benchbox.measure.flops import FlopCounter
from benchbox.measure.memory import plain_tensors
from benchbox.measure.peaks import TF32
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import operation_name
from benchbox.registry.phases import OUTSIDE_PHASES
from benchbox.registry.products import ShapeClass, shape_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from benchbox.measure.towers import TowerTracker
    from benchbox.store.rank_profile import PhaseBytes, ProductCost

# They make tensors or views and touch no element.
_NO_TRAFFIC = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias", "detach",
    "lift_fresh", "set_", "resize_", "record_stream",
})  # fmt: skip
# They write their first argument and do not read it.
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "uniform_", "normal_", "_foreach_copy_", "_foreach_zero_"})
# They read only some elements of their first argument, as many as they return.
_SELECTING = frozenset({"embedding", "index", "index_select", "gather"})
# They declare their gradients as written, and write them only to undo a loss scale.
_FUSED_OPTIMIZERS = frozenset({"_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_"})
_FACTORS = {"mm": (0, 1), "addmm": (1, 2), "_scaled_mm": (0, 1)}


class StepCosts:
    """Receives the operations of a step (see `OperationDispatchMode`) and sums their costs by phase.

    Bytes are those of the tensors that an operation reads and writes, each argument and result once, whether or not a cache
    holds them. Views cost nothing, and collectives are counted apart.

    Args:
        phase: returns the running phase.
        towers: follows the towers of the same step.
    """

    def __init__(self, phase: Callable[[], str | None], towers: TowerTracker) -> None:
        self._phase = phase
        self._towers = towers
        self._flops = FlopCounter()
        self._products: Counter[tuple[str, str | None, str, ShapeClass]] = Counter()
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._collectives: defaultdict[str, CollectiveCounter] = defaultdict(CollectiveCounter)

    @property
    def recomputed_flops(self) -> int:
        """FLOPs that repeat work of the step, which the products include."""
        return self._flops.recomputed

    def products(self) -> list[ProductCost]:
        """Return FLOPs by phase, tower, dtype and class of shape."""
        return [
            {"phase": phase, "tower": tower, "dtype": dtype, "shape": shape, "flops": flops}
            for (phase, tower, dtype, shape), flops in self._products.items()
        ]

    def bytes_by_phase(self) -> dict[str, PhaseBytes]:
        """Return the bytes of every phase that has any."""
        return {
            phase: {
                "read": self._read[phase],
                "written": self._written[phase],
                "collectives": sum(calls["bytes"] for calls in self._collectives[phase].counts.values()),
            }
            for phase in {**self._read, **self._written, **self._collectives}
        }

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        phase = self._phase() or OUTSIDE_PHASES
        if CollectiveCounter.is_relevant(operation):
            self._collectives[phase].on_operation(operation, args, kwargs, result)
            return
        if FlopCounter.is_relevant(operation):
            before = self._flops.total
            self._flops.on_operation(operation, args, kwargs, result)
            dtype, shape = _classify(operation, args, result)
            self._products[phase, self._towers.current(), dtype, shape] += self._flops.total - before
        read, written = _traffic(operation, args, kwargs, result)
        self._read[phase] += read
        self._written[phase] += written

    def on_pass(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Receive a compiled pass over tensors, which is no operation of torch."""
        phase = self._phase() or OUTSIDE_PHASES
        self._read[phase] += sum(map(_touched_bytes, read))
        self._written[phase] += sum(map(_touched_bytes, written))


def _classify(operation: Any, args: tuple[Any, ...], result: Any) -> tuple[str, ShapeClass]:
    """Return the dtype and the class of shape of the product that an operation computes."""
    name = operation_name(operation)
    factors = plain_tensors(args)[:2]
    dtype = str(factors[1].dtype).removeprefix("torch.")  # the first may be a bias
    if dtype == "float32" and factors[1].is_cuda and _allows_tf32(name):
        dtype = TF32
    if name in _FACTORS:
        left, right = (args[index] for index in _FACTORS[name])
        return dtype, shape_class(left.shape[0], right.shape[1], left.shape[1])
    if name.startswith("convolution"):
        weight, output = (args[1], result) if name == "convolution" else (args[2], args[0])
        return dtype, shape_class(output.numel() // output.shape[1], weight.shape[0], math.prod(weight.shape[1:]))
    return dtype, "batched"


def _allows_tf32(name: str) -> bool:
    """Return whether torch allows TF32 for an operation: convolutions, which cuDNN computes, have a setting of their own."""
    is_convolution = name.startswith("convolution")
    try:
        return bool(torch.backends.cudnn.allow_tf32 if is_convolution else torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # torch refuses to read it where a program has set `fp32_precision` instead
        backends: Any = torch.backends
        return bool((backends.cudnn.conv if is_convolution else backends.cuda.matmul).fp32_precision == "tf32")


def _traffic(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Return the bytes that an operation reads, and those that it writes."""
    name = operation_name(operation)
    if name in _NO_TRAFFIC or getattr(operation, "is_view", False):
        return 0, 0
    mutable = _mutable_arguments(operation)
    if name in _FUSED_OPTIMIZERS and kwargs.get("grad_scale") is None:
        mutable -= {1, "grads"}
    read = written = 0
    storages = set()
    for position, argument in [*enumerate(args), *kwargs.items()]:
        is_mutable = position in mutable
        for tensor in plain_tensors([argument]):
            size = _touched_bytes(tensor)
            storages.add(tensor.untyped_storage()._cdata)  # noqa: SLF001 (the storage's identity)
            written += size if is_mutable else 0
            is_read = not (position == "out" or (position == 0 and name in _OVERWRITING))
            read += size if is_read else 0
    results = [tensor for tensor in plain_tensors([result]) if tensor.untyped_storage()._cdata not in storages]  # noqa: SLF001
    produced = sum(map(_touched_bytes, results))
    if name in _SELECTING and args:
        table = sum(map(_touched_bytes, plain_tensors(args[:1])))
        read += min(table, produced) - table
    return read, written + produced


@lru_cache(maxsize=4096)
def _mutable_arguments(operation: Any) -> frozenset[int | str]:
    """Return the positions and names of the arguments that an operation writes."""
    schema = getattr(operation, "_schema", None)
    if schema is None:  # an operator of higher order
        return frozenset()
    mutable: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            mutable |= {position, argument.name}
    return frozenset(mutable)


def _touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor, each once where it repeats them."""
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())
