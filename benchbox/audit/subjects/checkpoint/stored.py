"""Content of a checkpoint in any format: the weights, and the tensors that its optimizers stepped."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from benchbox.observer.introspect.tensors import dtype_name, is_plain, local_shard, stored_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from benchbox.observer.facts import OpaqueOptimizer

# The dtype of a tensor that the checkpoint does not show.
UNKNOWN = "unknown"
# Last parts of the names of buffers, for checkpoints that do not list them: batch norms, rotary embeddings, positions.
_BUFFER_NAMES = frozenset(
    {
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "inv_freq",
        "original_inv_freq",
        "freqs",
        "freqs_cis",
        "cos_cached",
        "sin_cached",
        "position_ids",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """A tensor in a checkpoint. Its dtype and shape are known; its values are read on demand.

    `shape` is that of the part which is stored here, `ndim` the dimensions of the full tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    ndim: int
    element_bytes: int
    read: Callable[[], Tensor]
    parts_bytes: int | None = None  # of the tensors that a quantised one consists of

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return self.elements * self.element_bytes if self.parts_bytes is None else self.parts_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementRange:
    """Elements `start` to `stop` of an array in its flattened order."""

    array: StoredArray
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSteppedTensor:
    """One tensor that an optimizer stepped, or a rank's part of it: a master or the weight itself, its state, its options.

    `weight` is None where the checkpoint does not store it, or does not show which of its tensors (`candidates`) it is; `dtype`
    is still known if all candidates have the same, and `shape` if its state or a copy shows it. `live` is the weight that a
    master was rounded into, as far as it is stored. `compensation` is what keeps updates of a 16-bit tensor from being lost,
    where the checkpoint says so beside the state.
    `state_is_matched` is False where the state may belong to another weight of equal shape, dtypes and options.
    """

    name: str
    optimizer: str
    dtype: str
    weight: StoredArray | None
    candidates: tuple[StoredArray, ...] = ()
    shape: tuple[int, ...] | None = None
    state: Mapping[str, StoredArray]
    options: Mapping[str, object]
    step_count: float | None
    is_master: bool = False
    live: ElementRange | None = None
    live_dtype: str | None = None
    ndim: int | None = None
    covers: tuple[str, ...] = ()
    compensation: str | None = None
    state_is_matched: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCheckpoint:
    """The part of a checkpoint that one rank saved.

    `buffers` names the buffers of the model, None where nothing lists them. `unoptimized` names the trainable parameters that
    no optimizer holds, where the checkpoint tells them from frozen ones.
    """

    rank: int = 0
    world_size: int = 1
    optimizer_chain: tuple[str, ...] = ()
    model: Mapping[str, StoredArray]
    stepped: Sequence[StoredSteppedTensor]
    opaque: Sequence[OpaqueOptimizer] = ()
    groups: Sequence[tuple[float, int]] = ()
    buffers: frozenset[str] | None = None
    unoptimized: frozenset[str] = frozenset()

    def is_buffer(self, name: str) -> bool:
        return name in self.buffers if self.buffers is not None else is_buffer_name(name)


def is_buffer_name(name: str) -> bool:
    """Return whether a name is one of the usual ones of buffers: a state dictionary does not list its buffers."""
    return name.rsplit(".", 1)[-1] in _BUFFER_NAMES


def describe_tensor(tensor: Tensor) -> StoredArray:
    """Describe a loaded tensor, usually one that is mapped from its file; of a DTensor its local shard."""
    shard = local_shard(tensor)
    if is_plain(shard):
        shard = shard.detach()
    return StoredArray(
        dtype=dtype_name(shard),
        shape=tuple(shard.shape),
        ndim=tensor.ndim,
        element_bytes=shard.element_size(),
        read=lambda: shard,
        parts_bytes=None if is_plain(shard) else stored_bytes(shard),
    )
