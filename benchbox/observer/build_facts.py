"""Facts of one rank, built from the state of its observer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .facts import REDUCTIONS, CensusEntry, OpaqueOptimizer, RankFacts, Scaler, Schedule, StepFacts
from .introspect.names import live_buffers, live_parameters
from .introspect.tensors import local_shard
from .introspect.wrappers import configured_reduction, parameter_groups, read_prepared, read_setup
from .numerics.expected_update import float_or_none
from .state import named_schedules
from .tensor_facts import (
    buffer_facts,
    foreign_tensors,
    opaque_facts,
    parameter_facts,
    stepped_tensor_facts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from .state import ObservedOptimizer, ObserverState, StepObservation

_NO_STEP = "no optimizer step was seen"


def build_facts(
    state: ObserverState, rank: int, world_size: int, problems: tuple[str, ...], *, unobserved: str | None
) -> RankFacts:
    """Return all observations in the form that rules read.

    Args:
        state: the state of the observer.
        rank: the rank of this process.
        world_size: the number of ranks.
        problems: what the observer failed at.
        unobserved: why the steps of an optimizer were not observed; None if all were.
    """
    optimizers = list(state.optimizers.values())
    model = max(state.objects.models, key=_numel, default=None)
    accelerator = state.objects.accelerator
    _count_tensors(state, optimizers)
    chain = optimizers[0].chain if optimizers else []
    averages = tuple(state.averages.facts(len(state.steps)))
    reached = {name: _reached_optimizers(schedule, optimizers) for name, schedule in named_schedules(state.objects.schedules)}
    return RankFacts(
        rank=rank,
        world_size=world_size,
        source=state.source,
        optimizer_chain=tuple(type(optimizer).__name__ for optimizer in chain),
        entries=(*state.census.entries(rank), *_operation_entries(state, rank, model)),
        stepped=tuple(stepped_tensor_facts(state, optimizers)),
        opaque=(
            *opaque_facts(state, optimizers),
            *([OpaqueOptimizer(optimizer="a further optimizer", reason=unobserved)] if unobserved and optimizers else []),
        ),
        parameters=tuple(parameter_facts(state)),
        buffers=tuple(buffer_facts(state)),
        averages=averages,
        accumulated_in=tuple(sorted(state.forward_hooks.accumulated_in)),
        collectives=tuple(state.operations.collectives.by_dtype()),
        reduction=configured_reduction(model) if model is not None else None,
        steps=tuple(_step_facts(observation, reached) for observation in state.steps),
        schedules=tuple(_schedule_facts(state, reached)),
        scaler=_scaler(state, model),
        products=state.operations.matmuls.counts,
        products_with_gradient=dict(state.operations.matmuls.with_gradient),
        autocast=state.forward_hooks.autocast,
        loads=tuple(state.calls.loads),
        setup=read_setup(model, chain, accelerator) if model is not None else None,
        prepared=read_prepared(accelerator, [observed.optimizer for observed in optimizers])
        if accelerator is not None
        else None,
        groups=tuple(group for observed in optimizers for group in observed.decay_groups()),
        strangers=tuple(foreign_tensors(state, optimizers)),
        default_decay=_default_decay(optimizers[0]) if optimizers else None,
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        contract=state.contract,
        libraries=state.libraries,
        locations=tuple(state.locations.locations(_constructed(state, optimizers), state.objects.models)),
        missing=_missing_sections(state, optimizers, model, unobserved or _NO_STEP, has_averages=bool(averages)),
        problems=problems,
    )


def _constructed(state: ObserverState, optimizers: Sequence[ObservedOptimizer]) -> list[Any]:
    return [*(observed.optimizer for observed in optimizers), *state.objects.schedules]


def _operation_entries(state: ObserverState, rank: int, model: nn.Module | None) -> Iterator[CensusEntry]:
    """Yield census entries of one step's operations: matrix products of its forward pass, and its reductions over ranks."""
    _, parameter = (None, None) if model is None else next(live_parameters(model), (None, None))
    device = "unknown" if parameter is None else str(local_shard(parameter).device)
    for dtype, (count, elements, size) in state.operations.matmuls.totals.items():
        yield CensusEntry(rank=rank, kind="product", dtype=dtype, device=device, tensors=count, elements=elements, bytes=size)
    for collective in state.operations.collectives.by_dtype():
        if collective.operation in REDUCTIONS:
            yield CensusEntry(
                rank=rank,
                kind="reduction",
                dtype=collective.dtype,
                device=device,
                tensors=collective.count,
                elements=collective.elements,
                bytes=collective.bytes,
            )


def _count_tensors(state: ObserverState, optimizers: Sequence[ObservedOptimizer]) -> None:
    for model in state.objects.models:
        for _, parameter in live_parameters(model):
            state.census.count("parameter", parameter, parameter)
        for _, buffer in live_buffers(model):
            state.census.count("buffer", buffer, buffer)
    snapshots = [snapshot for observed in optimizers for snapshot in observed.snapshots.values()]
    for snapshot in snapshots:
        state.census.count_state(snapshot.tensor, snapshot.optimizer_state)
    masters = [snapshot.tensor for snapshot in snapshots]
    masters += [link.stepped for link in state.links.values()]  # a rank may hold masters that other ranks step
    for tensor in masters:
        if not state.is_live(tensor):
            state.census.count("master", tensor, tensor)


def _step_facts(observation: StepObservation, reached: Mapping[str, set[int]]) -> StepFacts:
    """Return the facts of a step, without the rates of schedules whose optimizers take no part in it.

    A generator takes no part in the steps of its critic, for example.
    """
    stepped = observation.rates.keys()
    waiting = {name for name, optimizers in reached.items() if optimizers and not optimizers & stepped}
    norm = observation.norm
    clip = None if norm is None else norm.clip
    return StepFacts(
        step=observation.step,
        micro_batches=observation.micro_batches,
        ends_epoch=observation.ends_epoch,
        rates=observation.rates_by_name(),
        schedule_rates={name: rates for name, rates in observation.schedule_rates.items() if name not in waiting},
        schedule_steps=observation.schedule_steps,
        reported_norm=None if clip is None else float(clip.norm),
        max_norm=None if clip is None else clip.max_norm,
        stepped_norm=None if norm is None else norm.stepped,
        clip_scale=None if clip is None else clip.scale,
        changed_gradients=next(iter(observation.changed_gradients.values()), None),
    )


def _reached_optimizers(schedule: Any, optimizers: Sequence[ObservedOptimizer]) -> set[int]:
    """Return the ids of the optimizers whose parameter groups, or those of a wrapper, this schedule writes into."""
    scheduled = getattr(schedule, "optimizer", None)
    groups = _group_ids(scheduled)
    return {
        id(observed.optimizer)
        for observed in optimizers
        if any(optimizer is scheduled or groups & _group_ids(optimizer) for optimizer in observed.chain)
    }


def _group_ids(optimizer: Any) -> set[int]:
    return {id(group) for group in parameter_groups(optimizer)}


def _schedule_facts(state: ObserverState, reached: Mapping[str, set[int]]) -> Iterator[Schedule]:
    for name, schedule in named_schedules(state.objects.schedules):
        optimizer = type(getattr(schedule, "optimizer", None)).__name__
        yield Schedule(name=name, optimizer=optimizer, reaches=bool(reached[name]) if state.optimizers else None)


def _scaler(state: ObserverState, model: nn.Module | None) -> Scaler | None:
    calls = state.calls
    if calls.scaler is not None:
        return Scaler(name=calls.scaler, steps=calls.scaled_steps, skipped=calls.skipped)
    if callable(fp16 := getattr(model, "fp16_enabled", None)) and fp16():  # a DeepSpeed engine
        return Scaler(
            name="DeepSpeed", steps=int(getattr(model, "global_steps", 0)), skipped=int(getattr(model, "skipped_steps", 0))
        )
    return Scaler(name="the script", steps=0, skipped=0) if calls.loss_scale.was_scaled else None


def _default_decay(observed: ObservedOptimizer) -> float | None:
    return float_or_none(observed.optimizer.defaults.get("weight_decay"))


def _missing_sections(
    state: ObserverState,
    optimizers: Sequence[ObservedOptimizer],
    model: nn.Module | None,
    no_step: str,
    *,
    has_averages: bool,
) -> dict[str, str]:
    missing: dict[str, str] = {}
    if not optimizers:
        missing |= dict.fromkeys(
            ("stepped", "options", "numbers", "links", "gradients", "steps", "schedule", "prepared"), no_step
        )
        if state.calls.scaler is None:
            missing["scaler"] = no_step
    if model is None:
        missing |= dict.fromkeys(("links", "parameters", "buffers", "setup"), "no model was found around the optimizer")
    if state.operations.missing is not None:
        missing |= dict.fromkeys(("collectives", "products"), state.operations.missing)
    if state.forward_hooks.autocast is None:
        missing["autocast"] = "no forward pass was seen"
    if not any(observation.clips or observation.reported for observation in state.steps):
        missing["clip"] = "no clipping was seen"
    if not has_averages:
        missing["averages"] = "no average of the weights was " + ("found" if state.averages.searched else "searched for")
    if not state.objects.schedules:
        missing["schedule"] = "no learning-rate schedule was found"
    return missing


def _numel(model: nn.Module) -> int:
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in live_parameters(model))
