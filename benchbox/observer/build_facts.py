"""From what an observer noted to the facts it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .facts import REDUCTIONS, CensusEntry, RankFacts, Scaler, Schedule, StepFacts
from .introspect.tensors import local_shard
from .introspect.wrappers import configured_reduction, prepared_by, setup_of
from .state import named
from .tensor_facts import buffers, float_or_none, opaque, parameters, stepped_tensors, strangers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from .state import Notebook, StepNotes, Stepping

_NO_STEP = "no optimizer step was seen"


def testimony(book: Notebook, rank: int, world_size: int, problems: tuple[str, ...]) -> RankFacts:
    """Everything that was noted, in the form that rules read."""
    stepping = list(book.stepping.values())
    model = max(book.around.models, key=_size, default=None)
    _count(book, stepping)
    chain = stepping[0].chain if stepping else []
    reached = {name: _reached(schedule, stepping) for name, schedule in named(book.around.schedules)}
    return RankFacts(
        rank=rank,
        world_size=world_size,
        source=book.source,
        optimizer_chain=tuple(type(link).__name__ for link in chain),
        entries=(*book.sizes.entries(rank), *_flows(book, rank, model)),
        stepped=tuple(stepped_tensors(book, stepping)),
        opaque=tuple(opaque(book, stepping)),
        parameters=tuple(parameters(book)),
        buffers=tuple(buffers(book)),
        accumulated_in=tuple(sorted(book.forward.accumulated_in)),
        collectives=tuple(book.operations.collectives.by_dtype()),
        reduction=configured_reduction(model) if model is not None else None,
        steps=tuple(_course(notes, reached) for notes in book.steps),
        schedules=tuple(_schedules(book, reached)),
        scaler=_scaler(book, model),
        products=book.operations.products.forward,
        autocast=book.forward.autocast,
        loads=tuple(book.calls.loads),
        setup=setup_of(model, chain, book.around.accelerator) if model is not None else None,
        prepared=prepared_by(book.around.accelerator, [each.optimizer for each in stepping])
        if book.around.accelerator is not None
        else None,
        groups=tuple(group for each in stepping for group in each.groups()),
        strangers=tuple(strangers(book, stepping)),
        default_decay=next((_default_decay(each) for each in stepping), None),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        contract=book.contract,
        missing=_missing(book, stepping, model),
        problems=problems,
    )


def _flows(book: Notebook, rank: int, model: nn.Module | None) -> Iterator[CensusEntry]:
    """What one step computed and reduced in: matrix products of its forward pass, and its reductions over ranks."""
    parameter = None if model is None else next(model.parameters(), None)
    device = "unknown" if parameter is None else str(local_shard(parameter).device)
    for dtype, (count, elements, size) in book.operations.products.seen.items():
        yield CensusEntry(rank=rank, kind="product", dtype=dtype, device=device, tensors=count, elements=elements, bytes=size)
    for found in book.operations.collectives.by_dtype():
        if found.operation in REDUCTIONS:
            yield CensusEntry(
                rank=rank,
                kind="reduction",
                dtype=found.dtype,
                device=device,
                tensors=found.count,
                elements=found.elements,
                bytes=found.bytes,
            )


def _count(book: Notebook, stepping: Sequence[Stepping]) -> None:
    for model in book.around.models:
        for parameter in model.parameters():
            book.sizes.count("parameter", parameter, parameter)
        for buffer in model.buffers():
            book.sizes.count("buffer", buffer, buffer)
    for each in stepping:
        for held in each.held.values():
            book.sizes.count_state(held.tensor, held.state)
    stepped = [held.tensor for each in stepping for held in each.held.values()]
    for tensor in [*stepped, *(link.stepped for link in book.links.values())]:  # a rank may hold what others step
        if not book.is_live(tensor):
            book.sizes.count("master", tensor, tensor)


def _course(notes: StepNotes, reached: Mapping[str, set[int]]) -> StepFacts:
    """Without rates of schedules whose optimizers take no part in this step: a generator's, whose critic steps more often."""
    waiting = {name for name, optimizers in reached.items() if optimizers and not optimizers & notes.rates.keys()}
    return StepFacts(
        step=notes.step,
        micro_batches=notes.micro_batches,
        rates=notes.named_rates(),
        schedule_rates={name: rates for name, rates in notes.schedule_rates.items() if name not in waiting},
        schedule_steps=notes.schedule_steps,
        reported_norm=None if notes.norm is None else float(notes.norm[0]),
        max_norm=None if notes.norm is None else notes.norm[1],
        stepped_norm=notes.stepped_norm,
    )


def _reached(schedule: Any, stepping: Sequence[Stepping]) -> set[int]:
    """Ids of the optimizers that step with groups which this schedule writes into."""
    optimizer = getattr(schedule, "optimizer", None)
    own = {id(group) for group in getattr(optimizer, "param_groups", ())}
    return {
        id(each.optimizer)
        for each in stepping
        if any(link is optimizer or own & {id(group) for group in getattr(link, "param_groups", ())} for link in each.chain)
    }


def _schedules(book: Notebook, reached: Mapping[str, set[int]]) -> Iterator[Schedule]:
    for name, schedule in named(book.around.schedules):
        optimizer = type(getattr(schedule, "optimizer", None)).__name__
        yield Schedule(name=name, optimizer=optimizer, reaches=bool(reached[name]) if book.stepping else None)


def _scaler(book: Notebook, model: nn.Module | None) -> Scaler | None:
    calls = book.calls
    if calls.scaler is not None:
        return Scaler(name=calls.scaler, steps=calls.scaled_steps, skipped=calls.skipped)
    if callable(fp16 := getattr(model, "fp16_enabled", None)) and fp16():  # a DeepSpeed engine
        return Scaler(
            name="DeepSpeed", steps=int(getattr(model, "global_steps", 0)), skipped=int(getattr(model, "skipped_steps", 0))
        )
    return None


def _default_decay(stepping: Stepping) -> float | None:
    return float_or_none(stepping.optimizer.defaults.get("weight_decay"))


def _missing(book: Notebook, stepping: Sequence[Stepping], model: nn.Module | None) -> dict[str, str]:
    missing: dict[str, str] = {}
    if not stepping:
        missing |= dict.fromkeys(
            ("stepped", "options", "numbers", "links", "gradients", "steps", "schedule", "prepared"), _NO_STEP
        )
        if book.calls.scaler is None:
            missing["scaler"] = _NO_STEP
    if model is None:
        missing |= dict.fromkeys(("links", "parameters", "buffers", "setup"), "no model was found around the optimizer")
    if book.operations.missing is not None:
        missing |= dict.fromkeys(("collectives", "products"), book.operations.missing)
    if book.forward.autocast is None:
        missing["autocast"] = "no forward pass was seen"
    if all(notes.norm is None for notes in book.steps):
        missing["clip"] = "no clipping was seen"
    if not book.around.schedules:
        missing["schedule"] = "no learning-rate schedule was found"
    return missing


def _size(model: nn.Module) -> int:
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
