"""Counts of the collectives that really run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..facts import CollectiveUse
from .dispatch import operation_name

_NAMESPACES = frozenset({"c10d", "_c10d_functional"})
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
}
_NOT_COLLECTIVE = frozenset({"wait_tensor", "monitored_barrier_", "_wrap_tensor_autograd"})


class CollectiveCounter:
    """Counts calls, bytes and dtypes of the collectives that this rank takes part in.

    `bytes` is the size of the larger of input and output. It is the same for an all-reduce of N bytes, a reduce-scatter of N
    bytes into shards and an all-gather of shards into N bytes.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], list[int]] = {}  # (name, dtype): count, elements, bytes

    @staticmethod
    def is_relevant(operation: Any) -> bool:
        """Return whether an operation is a collective."""
        return getattr(operation, "namespace", None) in _NAMESPACES and operation_name(operation) not in _NOT_COLLECTIVE

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        raw_name = operation_name(operation)
        name = _NAMES.get(raw_name, raw_name)
        # c10d takes outputs before inputs; the functional collectives take inputs and return outputs.
        candidates = [_tensors(argument) for argument in (*args[:2], *kwargs.values(), result)]
        largest = max(candidates, key=lambda tensors: sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        dtype = str(largest[0].dtype).removeprefix("torch.") if largest else "none"
        total = self._totals.setdefault((name, dtype), [0, 0, 0])
        total[0] += 1
        total[1] += sum(tensor.numel() for tensor in largest)
        total[2] += sum(tensor.numel() * tensor.element_size() for tensor in largest)

    def by_dtype(self) -> list[CollectiveUse]:
        """Return one entry per kind and dtype."""
        return [
            CollectiveUse(operation=name, dtype=dtype, count=count, elements=elements, bytes=size)
            for (name, dtype), (count, elements, size) in self._totals.items()
        ]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Count and bytes by kind, summed over dtypes."""
        counts: dict[str, dict[str, int]] = {}
        for (name, _), (count, _, size) in self._totals.items():
            entry = counts.setdefault(name, {"count": 0, "bytes": 0})
            entry["count"] += count
            entry["bytes"] += size
        return counts


def _tensors(argument: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)]
