"""Convert the content of a checkpoint to the facts that rules read."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from benchbox.audit.subjects.checkpoint.numbers import measure_numbers
from benchbox.audit.subjects.checkpoint.stored import UNKNOWN
from benchbox.observer.facts import SECTIONS, CensusEntry, LiveTensor, RankFacts, SteppedTensor
from benchbox.observer.introspect.masters import compensating_state
from benchbox.observer.numerics.expected_update import adam_betas, float_or_none

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.subjects.checkpoint.stored import RankCheckpoint, StoredArray, StoredSteppedTensor

# The original device is unknown: a tensor that a rank had on its GPU may have been saved from its CPU.
_DEVICE = "file"
_OBSERVABLE_SECTIONS = frozenset({"stepped", "options", "links", "buffers"})


def checkpoint_facts(ranks: Sequence[RankCheckpoint]) -> list[RankFacts]:
    """Return the facts of all ranks, as far as a checkpoint shows them.

    Raises:
        DataError: a tensor cannot be read.
    """
    missing = _missing_sections(ranks)
    return [_rank_facts(checkpoint, missing) for checkpoint in ranks]


def _rank_facts(checkpoint: RankCheckpoint, missing: dict[str, str]) -> RankFacts:
    return RankFacts(
        rank=checkpoint.rank,
        world_size=checkpoint.world_size,
        source="checkpoint",
        optimizer_chain=checkpoint.optimizer_chain,
        entries=tuple(_census(checkpoint)),
        stepped=tuple(_stepped_tensor(tensor) for tensor in checkpoint.stepped),
        opaque=tuple(checkpoint.opaque),
        parameters=tuple(_live_tensors(checkpoint, buffers=False)),
        buffers=tuple(_live_tensors(checkpoint, buffers=True)),
        groups=tuple(checkpoint.groups),
        missing=missing,
    )


def _missing_sections(ranks: Sequence[RankCheckpoint]) -> dict[str, str]:
    """Return the sections that the checkpoint of all ranks does not show: a single rank may have saved no part of the model."""
    missing = {name: "a checkpoint shows no steps" for name in SECTIONS if name not in _OBSERVABLE_SECTIONS}
    missing["parameters"] = "a checkpoint does not show which tensors the running model computed with"
    missing |= dict.fromkeys(("process", "setup", "autocast"), "a checkpoint does not show the process that wrote it")
    missing |= dict.fromkeys(("prepared", "schedule"), "a checkpoint does not show what its optimizer was handed to")
    stepped = [tensor for checkpoint in ranks for tensor in checkpoint.stepped]
    if not stepped:
        opaque = any(checkpoint.opaque for checkpoint in ranks)
        reason = "the optimizer state in it cannot be read" if opaque else "the checkpoint holds no optimizer state"
        missing |= dict.fromkeys(("stepped", "options", "links"), reason)
    elif not any(tensor.is_master for tensor in stepped):
        missing["links"] = "the checkpoint holds no masters beside live weights"
    if unknown := sum(tensor.dtype == UNKNOWN for tensor in stepped):
        missing["stepped"] = f"the checkpoint does not show the weights of {unknown} of {len(stepped)} stepped tensors"
    if not any(checkpoint.model for checkpoint in ranks):
        missing["buffers"] = "the checkpoint holds no model"
    return missing


def _census(checkpoint: RankCheckpoint) -> Iterator[CensusEntry]:
    """Count each stored tensor once. Slices of one partition are one tensor of the optimizer, but separate tensors here."""
    totals: dict[tuple[str, str], Counter[str]] = {}

    def count(kind: str, array: StoredArray) -> None:
        total = totals.setdefault((kind, array.dtype), Counter())
        total.update(tensors=1, elements=array.elements, bytes=array.stored_bytes)

    for name, array in checkpoint.model.items():
        count("buffer" if checkpoint.is_buffer(name) else "parameter", array)
    for tensor in checkpoint.stepped:
        if tensor.is_master and tensor.weight is not None:
            count("master", tensor.weight)
        for name, array in tensor.state.items():
            count(name, array)
    for (kind, dtype), total in totals.items():
        yield CensusEntry(rank=checkpoint.rank, kind=kind, dtype=dtype, device=_DEVICE, **total)


def _live_tensors(checkpoint: RankCheckpoint, *, buffers: bool) -> Iterator[LiveTensor]:
    stepped = {name for tensor in checkpoint.stepped for name in (tensor.name, *tensor.covers)}
    for name, array in checkpoint.model.items():
        if checkpoint.is_buffer(name) == buffers:
            yield LiveTensor(
                name=name,
                dtype=array.dtype,
                device=_DEVICE,
                elements=array.elements,
                ndim=array.ndim,
                trainable=name in stepped or name in checkpoint.unoptimized,
                linked=name in stepped if name in stepped or name in checkpoint.unoptimized else None,
            )


def _stepped_tensor(tensor: StoredSteppedTensor) -> SteppedTensor:
    shape = tensor.shape if tensor.weight is None else tensor.weight.shape
    live_dtype = tensor.live_dtype if tensor.is_master else (None if tensor.dtype == UNKNOWN else tensor.dtype)
    state = {name: array.dtype for name, array in tensor.state.items()}
    return SteppedTensor(
        name=tensor.name,
        optimizer=tensor.optimizer,
        dtype=tensor.dtype,
        device=_DEVICE,
        shape=shape or (),
        elements=0 if shape is None else prod(shape),
        live=not tensor.is_master and tensor.dtype != UNKNOWN,
        live_dtype=live_dtype,
        live_ndim=tensor.ndim,
        covers=tensor.covers,
        lr=float_or_none(tensor.options.get("lr")),
        betas=adam_betas(tensor.options),
        eps=float_or_none(tensor.options.get("eps")),
        weight_decay=float_or_none(tensor.options.get("weight_decay")),
        decoupled_decay=_bool_or_none(tensor.options.get("decoupled_weight_decay")),
        fused=tensor.options.get("fused") is True,
        state=state,
        compensation=tensor.compensation or compensating_state(state),
        step_count=tensor.step_count,
        numbers=measure_numbers(tensor),
    )


def _bool_or_none(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
