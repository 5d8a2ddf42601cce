"""Recorded tensor operations, and their replay on a device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, UntypedStorage


@dataclass(frozen=True, slots=True)
class TensorView:
    """A recorded tensor, as a view of a numbered storage. An operation that only makes a view needs no replay."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, storage: UntypedStorage) -> Tensor:
        """Return the same view of another storage."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """A recorded operation, with views in place of meta tensors, and the storages that it reads, writes or creates."""

    function: Any
    args: Any
    kwargs: Any
    result: Any
    storages: frozenset[int]
    draws: bool  # random numbers, so that its place in the order matters

    @property
    def can_advance(self) -> bool:
        """True if it can run before recorded operations on other storages."""
        return not self.draws and len(self.storages) == 1


def storages_of(structure: Any) -> set[int]:
    """Return the numbers of the storages of all recorded tensors in the arguments or the result of an operation."""
    return {leaf.storage for leaf in _leaves(structure) if isinstance(leaf, TensorView)}


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Apply a function to the leaves of the tuples, lists and dictionaries of an operation. `torch.utils._pytree` is slower."""
    if isinstance(structure, tuple | list):
        return [map_leaves(function, item) for item in structure]
    if isinstance(structure, dict):
        return {key: map_leaves(function, item) for key, item in structure.items()}
    return function(structure)


def _leaves(structure: Any) -> Iterator[Any]:
    if isinstance(structure, tuple | list | dict):
        for item in structure.values() if isinstance(structure, dict) else structure:
            yield from _leaves(item)
    else:
        yield structure


class Replay:
    """Execution of recorded operations, which frees every storage after the last operation on it."""

    def __init__(self, operations: list[RecordedOperation]) -> None:
        self._operations = operations
        self._storages: dict[int, UntypedStorage] = {}
        self._remaining: defaultdict[int, list[int]] = defaultdict(list)  # operations by storage, in order
        for index, operation in enumerate(operations):
            for number in operation.storages:
                self._remaining[number].append(index)

    def run(self, finish: Callable[[int, UntypedStorage], None]) -> None:
        """Execute all operations, and call `finish` with the number of each storage when it has its final contents."""
        for index, operation in enumerate(self._operations):
            if any(index in self._remaining[number] for number in operation.storages):
                self._execute(index)
            for number in operation.storages & self._storages.keys():
                # Published weights are loaded last. No tensor waits for the end of the construction because of them.
                remaining = self._remaining[number]
                if all(self._operations[later].can_advance for later in remaining):
                    for later in list(remaining):
                        self._execute(later)
                    finish(number, self._storages.pop(number))

    def _execute(self, index: int) -> None:
        operation = self._operations[index]
        args, kwargs = map_leaves(self._realise, operation.args), map_leaves(self._realise, operation.kwargs)
        result = operation.function(*args, **kwargs)
        for tensor, view in zip(_leaves(result), _leaves(operation.result), strict=True):
            if isinstance(view, TensorView):
                self._storages.setdefault(view.storage, tensor.untyped_storage())
        for number in operation.storages:
            self._remaining[number].remove(index)

    def _realise(self, leaf: Any) -> Any:
        return leaf.of(self._storages[leaf.storage]) if isinstance(leaf, TensorView) else leaf
