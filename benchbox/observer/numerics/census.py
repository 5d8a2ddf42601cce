"""Counting what a step touches: how many tensors of which kind, dtype and device a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..facts import CensusEntry
from ..introspect.tensors import dtype_name, local_shard

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Size(NamedTuple):
    dtype: str
    device: str
    elements: int
    bytes: int


class Sizes:
    """Counts each tensor once, whatever it is met in."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, int], _Size] = {}  # by kind and the id of the tensor it belongs to

    def count(self, kind: str, owner: Tensor, tensor: Tensor) -> None:
        """`owner` is the parameter or stepped tensor that `tensor` is the gradient, the state or the value of."""
        held = local_shard(tensor)
        size = _Size(dtype_name(held), str(held.device), held.numel(), held.numel() * held.element_size())
        self._sizes[kind, id(owner)] = size

    def count_state(self, owner: Tensor, state: Mapping[Any, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor):
                self.count(str(name), owner, value)

    def dtype(self, kind: str, owner: Tensor) -> str | None:
        """Of what was counted under this kind for a tensor."""
        size = self._sizes.get((kind, id(owner)))
        return None if size is None else size.dtype

    def entries(self, rank: int) -> tuple[CensusEntry, ...]:
        sums: dict[tuple[str, str, str], list[int]] = {}
        for (kind, _), size in self._sizes.items():
            total = sums.setdefault((kind, size.dtype, size.device), [0, 0, 0])
            for place, amount in enumerate((1, size.elements, size.bytes)):
                total[place] += amount
        return tuple(
            CensusEntry(rank=rank, kind=kind, dtype=dtype, device=device, tensors=tensors, elements=elements, bytes=size)
            for (kind, dtype, device), (tensors, elements, size) in sums.items()
        )
