"""Census of the tensors that a step touches, by kind, dtype and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..facts import CensusEntry
from ..introspect.tensors import dtype_name, local_shard, stored_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


class _TensorSize(NamedTuple):
    dtype: str
    device: str
    elements: int
    bytes: int


class TensorCensus:
    """Counts each tensor once per kind, however often it is recorded."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, int], _TensorSize] = {}  # by kind and the id of the owner

    def count(self, kind: str, owner: Tensor, tensor: Tensor) -> None:
        """Count the local shard of a tensor.

        Args:
            kind: kind of the census entry, see `CensusEntry`.
            owner: the parameter or stepped tensor that `tensor` is the value, the gradient or a state of.
            tensor: the tensor to count.
        """
        shard = local_shard(tensor)
        size = _TensorSize(dtype_name(shard), str(shard.device), shard.numel(), stored_bytes(shard))
        self._sizes[kind, id(owner)] = size

    def count_state(self, owner: Tensor, optimizer_state: Mapping[Any, Any]) -> None:
        """Count the state tensors that an optimizer holds for `owner`, each under its own name."""
        for name, value in optimizer_state.items():
            if isinstance(value, Tensor):
                self.count(str(name), owner, value)

    def dtype(self, kind: str, owner: Tensor) -> str | None:
        """Return the dtype counted under this kind for a tensor, or None."""
        size = self._sizes.get((kind, id(owner)))
        return None if size is None else size.dtype

    def entries(self, rank: int) -> tuple[CensusEntry, ...]:
        """Return one entry per kind, dtype and device."""
        totals: dict[tuple[str, str, str], list[int]] = {}
        for (kind, _), size in self._sizes.items():
            total = totals.setdefault((kind, size.dtype, size.device), [0, 0, 0])
            for index, amount in enumerate((1, size.elements, size.bytes)):
                total[index] += amount
        return tuple(
            CensusEntry(rank=rank, kind=kind, dtype=dtype, device=device, tensors=tensors, elements=elements, bytes=size)
            for (kind, dtype, device), (tensors, elements, size) in totals.items()
        )
