"""From what a checkpoint holds to the facts that rules read."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from benchbox.audit.subjects.checkpoint.numbers import measure_numbers
from benchbox.audit.subjects.checkpoint.stored import UNKNOWN
from benchbox.observer.facts import SECTIONS, CensusEntry, LiveTensor, RankFacts, SteppedTensor
from benchbox.observer.introspect.names import compensating_state
from benchbox.observer.tensor_facts import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.subjects.checkpoint.stored import StoredArray, RankCheckpoint, StoredSteppedTensor

# Where the tensors were is not asked: what a rank had on its GPU may have been saved from its CPU.
_DEVICE = "file"
_SEEN = frozenset({"stepped", "options", "links", "buffers"})


def checkpoint_facts(ranks: Sequence[RankCheckpoint]) -> list[RankFacts]:
    """The facts of all ranks, as far as a checkpoint shows them.

    Raises:
        DataError: a tensor cannot be read.
    """
    missing = _missing(ranks)
    return [_facts(stored, missing) for stored in ranks]


def _facts(stored: RankCheckpoint, missing: dict[str, str]) -> RankFacts:
    return RankFacts(
        rank=stored.rank,
        world_size=stored.world_size,
        source="checkpoint",
        optimizer_chain=stored.optimizer_chain,
        entries=tuple(_entries(stored)),
        stepped=tuple(_stepped(each) for each in stored.stepped),
        opaque=tuple(stored.opaque),
        parameters=tuple(_live(stored, buffers=False)),
        buffers=tuple(_live(stored, buffers=True)),
        groups=tuple(stored.groups),
        missing=missing,
    )


def _missing(ranks: Sequence[RankCheckpoint]) -> dict[str, str]:
    """What the checkpoint as a whole does not show: a rank may well have saved no part of the model."""
    missing = {name: "a checkpoint shows no steps" for name in SECTIONS if name not in _SEEN}
    missing["parameters"] = "a checkpoint does not show which tensors the running model computed with"
    missing |= dict.fromkeys(("process", "setup", "autocast"), "a checkpoint does not show the process that wrote it")
    missing |= dict.fromkeys(("prepared", "schedule"), "a checkpoint does not show what its optimizer was handed to")
    stepped = [each for stored in ranks for each in stored.stepped]
    if not stepped:
        opaque = any(stored.opaque for stored in ranks)
        reason = "the optimizer state in it cannot be read" if opaque else "the checkpoint holds no optimizer state"
        missing |= dict.fromkeys(("stepped", "options", "links"), reason)
    elif not any(each.is_master for each in stepped):
        missing["links"] = "the checkpoint holds no masters beside live weights"
    if unknown := sum(each.dtype == UNKNOWN for each in stepped):
        missing["stepped"] = f"the checkpoint does not show the weights of {unknown} of {len(stepped)} stepped tensors"
    if not any(stored.model for stored in ranks):
        missing["buffers"] = "the checkpoint holds no model"
    return missing


def _entries(stored: RankCheckpoint) -> Iterator[CensusEntry]:
    """Each tensor once. Parts of one partition are parts of one tensor of the optimizer, but tensors of their own here."""
    sums: dict[tuple[str, str], Counter[str]] = {}

    def count(kind: str, each: StoredArray) -> None:
        found = sums.setdefault((kind, each.dtype), Counter())
        found.update(tensors=1, elements=each.elements, bytes=each.elements * each.element_bytes)

    for name, tensor in stored.model.items():
        count("buffer" if stored.is_buffer(name) else "parameter", tensor)
    for each in stored.stepped:
        if each.is_master and each.weight is not None:
            count("master", each.weight)
        for name, tensor in each.state.items():
            count(name, tensor)
    for (kind, dtype), found in sums.items():
        yield CensusEntry(rank=stored.rank, kind=kind, dtype=dtype, device=_DEVICE, **found)


def _live(stored: RankCheckpoint, *, buffers: bool) -> Iterator[LiveTensor]:
    stepped = {name for each in stored.stepped for name in (each.name, *each.covers)}
    for name, tensor in stored.model.items():
        if stored.is_buffer(name) == buffers:
            yield LiveTensor(
                name=name,
                dtype=tensor.dtype,
                device=_DEVICE,
                elements=tensor.elements,
                ndim=tensor.ndim,
                trainable=name in stepped,
                linked=True if name in stepped else None,
            )


def _stepped(each: StoredSteppedTensor) -> SteppedTensor:
    shaped = each.weight or next((value for value in each.state.values() if value.elements > 1), None)
    betas = each.options.get("betas")
    return SteppedTensor(
        name=each.name,
        optimizer=each.optimizer,
        dtype=each.dtype,
        device=_DEVICE,
        shape=() if shaped is None else shaped.shape,
        elements=0 if shaped is None else shaped.elements,
        live=not each.is_master and each.dtype != UNKNOWN,
        live_dtype=each.live_dtype if each.is_master else (None if each.dtype == UNKNOWN else each.dtype),
        live_ndim=each.ndim,
        covers=each.covers,
        lr=number(each.options.get("lr")),
        betas=(float(betas[0]), float(betas[1])) if isinstance(betas, (tuple, list)) else None,
        eps=number(each.options.get("eps")),
        weight_decay=number(each.options.get("weight_decay")),
        decoupled_decay=_flag(each.options.get("decoupled_weight_decay")),
        state={name: value.dtype for name, value in each.state.items()},
        compensation=compensating_state({name: value.dtype for name, value in each.state.items()}),
        step_count=each.step_count,
        numbers=measure_numbers(each),
    )


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
