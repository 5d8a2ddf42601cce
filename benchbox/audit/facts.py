"""What a census holds: plain facts about the tensors of one step, free of torch, so that rules read them anywhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusEntry:
    """How many tensors of one kind, dtype and device a rank holds.

    `kind` is parameter, buffer, gradient (of a live parameter), master, master_gradient, step, or the optimizer's own name of a
    state tensor (exp_avg, exp_avg_sq, momentum_buffer, ...). Elements and bytes are those on this rank.
    """

    rank: int
    kind: str
    dtype: str
    device: str
    tensors: int
    elements: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedTensor:
    """One tensor that the innermost optimizer updated, and the state it updated it with.

    `name` is the parameter's name before any wrapping, or where the tensor hangs (`DeepSpeedZeroOptimizer.attribute[0]`) when
    it holds many parameters; `live` says that the model computes with this very tensor. `state` maps state names to dtypes.
    `compensation` names what keeps 16-bit updates from being lost, if anything does.
    """

    name: str
    optimizer: str
    dtype: str
    device: str
    elements: int
    live: bool
    betas: tuple[float, float] | None = None
    state: dict[str, str] = field(default_factory=dict)
    compensation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """An optimizer that the census cannot read, and why: what it does is unknown, and unknown never passes."""

    optimizer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Everything one step touched on one rank. Picklable, so that ranks can gather each other's."""

    rank: int
    optimizer_chain: tuple[str, ...]
    entries: tuple[CensusEntry, ...]
    stepped: tuple[SteppedTensor, ...]
    opaque: tuple[Opaque, ...] = ()


def all_stepped(censuses: Iterable[Census]) -> Iterator[tuple[int, SteppedTensor]]:
    """(rank, tensor) for every stepped tensor of every rank that holds a part of it."""
    for census in censuses:
        for tensor in census.stepped:
            if tensor.elements:
                yield census.rank, tensor
