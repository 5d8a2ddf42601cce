"""What a checkpoint holds, whatever wrote it: the weights, and what its optimizers stepped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.observer.introspect.tensors import dtype_name, local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from benchbox.observer.facts import OpaqueOptimizer

# A tensor whose dtype nothing in the checkpoint tells.
UNKNOWN = "unknown"
# By the end of their names, where nothing else says which tensors are buffers: batch norms, rotary embeddings, positions.
_BUFFERS = frozenset(
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
    """A tensor in a checkpoint. Its dtype and shape are known; it is read when its numbers are looked at.

    `shape` is that of the part which is held here, `ndim` the dimensions of the whole.
    """

    dtype: str
    shape: tuple[int, ...]
    ndim: int
    element_bytes: int
    read: Callable[[], Tensor]

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementRange:
    """Elements `start` to `stop` of a tensor, counted in its flattened order."""

    held: StoredArray
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSteppedTensor:
    """One tensor that an optimizer stepped, or a rank's part of it: a master or the weight itself, its state, its options.

    `weight` is None where the checkpoint does not hold it, or does not show which of its tensors (`among`) it is; `dtype` is
    still known if all that it can be are alike. `live` is what a master was rounded into, as far as the checkpoint holds it,
    and `state_is_own` is False where the state may be that of another weight of the same shape, dtypes and options.
    """

    name: str
    optimizer: str
    dtype: str
    weight: StoredArray | None
    among: tuple[StoredArray, ...] = ()
    state: Mapping[str, StoredArray]
    options: Mapping[str, object]
    step_count: float | None
    is_master: bool = False
    live: ElementRange | None = None
    live_dtype: str | None = None
    ndim: int | None = None
    covers: tuple[str, ...] = ()
    state_is_own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCheckpoint:
    """What one rank saved. `buffers` names those of the model's tensors that are buffers, None where nothing says so."""

    rank: int = 0
    world_size: int = 1
    optimizer_chain: tuple[str, ...] = ()
    model: Mapping[str, StoredArray]
    stepped: Sequence[StoredSteppedTensor]
    opaque: Sequence[OpaqueOptimizer] = ()
    groups: Sequence[tuple[float, int]] = ()
    buffers: frozenset[str] | None = None

    def is_buffer(self, name: str) -> bool:
        return name in self.buffers if self.buffers is not None else is_buffer(name)


def is_buffer(name: str) -> bool:
    """Told by the name: a state dictionary does not say which of its tensors are buffers."""
    return name.rsplit(".", 1)[-1] in _BUFFERS


def held(tensor: Tensor) -> StoredArray:
    """A tensor that is there already, as a rule mapped from its file. Of a DTensor its local part."""
    part = local(tensor).detach()
    return StoredArray(
        dtype=dtype_name(part),
        shape=tuple(part.shape),
        ndim=tensor.ndim,
        element_bytes=part.element_size(),
        read=lambda: part,
    )
