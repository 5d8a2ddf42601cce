"""From what a witness noted to the facts it gives."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .facts import (
    LiveTensor,
    Opaque,
    RankFacts,
    Scaler,
    Schedule,
    StepCourse,
    SteppedTensor,
)
from .kinds import dtype_name, local
from .looks import Look, numbers
from .setup import configured_reduction, optimizer_chain, prepared_by, setup_of
from .updates import betas_of
from .walk import compensation, dimensions, is_known, offload, own_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from .windows import Stepped
    from .witness import Witness

_NO_STEP = "no optimizer step was seen"


@dataclass
class StepNotes:
    """Of one step, while it goes."""

    step: int
    close: bool
    micro_batches: int | None = None
    called: list[nn.Module] = field(default_factory=list)
    norm: tuple[Any, float] | None = None
    clipped: frozenset[int] = frozenset()  # ids of the parameters that clipping was handed
    rates: dict[str, list[float]] = field(default_factory=dict)
    schedule_rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    schedule_steps: dict[str, int] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    stepped_norm: float | None = None

    def note_rates(self, optimizer: Optimizer, tensors: Stepped) -> None:
        """The learning rates in force, each once."""
        rates = self.rates.setdefault(type(optimizer).__name__, [])
        for group, _, tensor in tensors:
            self.stepped.add(id(tensor))
            if isinstance(rate := group.get("lr"), (int, float, Tensor)) and float(rate) not in rates:
                rates.append(float(rate))

    def note_schedules(self, schedules: Sequence[Any]) -> None:
        for name, schedule in _named(schedules):
            rates = getattr(schedule, "_last_lr", None)
            if rates is not None:
                self.schedule_rates[name] = tuple(dict.fromkeys(float(rate) for rate in rates))
            count = getattr(schedule, "_step_count", getattr(schedule, "last_batch_iteration", None))
            if count is not None:
                self.schedule_steps[name] = int(count)


@dataclass
class _Held:
    """What is known of a tensor that was stepped, as of its last close look."""

    tensor: Tensor
    options: dict[str, Any]
    place: int
    state: dict[str, Any]
    compensation: str | None
    gradient: str | None


class Stepping:
    """An optimizer that steps tensors itself, the wrappers around it (outermost first), and what it stepped."""

    def __init__(self, optimizer: Optimizer, chain: Sequence[Any]) -> None:
        self.optimizer = optimizer
        self.chain = list(chain)
        self.held: dict[int, _Held] = {}

    def note(self, tensor: Tensor, group: Mapping[str, Any], place: int, state: Mapping[str, Any]) -> None:
        options = {name: value for name, value in group.items() if name != "params"}
        gradient = None if tensor.grad is None else dtype_name(local(tensor.grad))
        self.held[id(tensor)] = _Held(tensor, options, place, dict(state), compensation(self.optimizer, state), gradient)

    def groups(self) -> list[tuple[float, int]]:
        """(weight decay, tensors) of the parameter groups as the script made them: of the outermost optimizer that has any."""
        for optimizer in self.chain:
            if groups := getattr(optimizer, "param_groups", None):
                found = [(float(group.get("weight_decay", 0.0)), len(group["params"])) for group in groups]
                if any(tensors for _, tensors in found):
                    return found
        # ZeRO-3 fills its groups only while it steps
        decays = [float(held.options.get("weight_decay", 0.0)) for held in self.held.values()]
        return [(decay, decays.count(decay)) for decay in dict.fromkeys(decays)]


def testimony(witness: Witness, problems: tuple[str, ...]) -> RankFacts:
    """Everything the witness saw, in the form that rules read."""
    rank, world_size = witness.rank
    stepping = witness.stepping
    model = max(witness.around.models, key=_size, default=None)
    _count(witness, stepping)
    chain = stepping[0].chain if stepping else []
    return RankFacts(
        rank=rank,
        world_size=world_size,
        source=witness.source,
        optimizer_chain=tuple(type(link).__name__ for link in chain),
        entries=witness.sizes.entries(rank),
        stepped=tuple(_all_stepped(witness, stepping)),
        opaque=tuple(_opaque(witness, stepping)),
        parameters=tuple(_parameters(witness, stepping)),
        buffers=tuple(_buffers(witness)),
        accumulated_in=tuple(sorted(witness.forward.accumulated_in)),
        collectives=tuple(witness.operations.collectives.by_dtype()),
        reduction=configured_reduction(model) if model is not None else None,
        steps=tuple(_course(notes) for notes in witness.notes),
        schedules=tuple(_schedules(witness, stepping)),
        scaler=_scaler(witness, model),
        products=dict(witness.operations.products.forward),
        autocast=witness.forward.autocast,
        loads=tuple(witness.calls.loads),
        setup=setup_of(model, chain, witness.around.accelerator) if model is not None else None,
        prepared=prepared_by(witness.around.accelerator, [each.optimizer for each in stepping])
        if witness.around.accelerator is not None
        else None,
        groups=tuple(group for each in stepping for group in each.groups()),
        strangers=tuple(_strangers(witness, stepping)),
        default_decay=next((_default_decay(each) for each in stepping), None),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        contract=witness.contract,
        missing=_missing(witness, stepping, model),
        problems=problems,
    )


def _count(witness: Witness, stepping: Sequence[Stepping]) -> None:
    for model in witness.around.models:
        for parameter in model.parameters():
            witness.sizes.count("parameter", parameter, parameter)
        for buffer in model.buffers():
            witness.sizes.count("buffer", buffer, buffer)
    for each in stepping:
        for held in each.held.values():
            witness.sizes.count_state(held.tensor, held.state)
    stepped = [held.tensor for each in stepping for held in each.held.values()]
    for tensor in [*stepped, *(link.stepped for link in witness.links.values())]:  # a rank may hold what others step
        if not witness.is_live(tensor):
            witness.sizes.count("master", tensor, tensor)


def _all_stepped(witness: Witness, stepping: Sequence[Stepping]) -> Iterator[SteppedTensor]:
    """One entry a parameter: a large one may be stepped in parts."""
    shapes = {place: count for model in witness.around.models for place, count in dimensions(model).items()}
    for each in stepping:
        parts: dict[tuple[Any, ...], list[_Held]] = defaultdict(list)
        for held in each.held.values():
            name = _name(witness, held, type(each.optimizer).__name__)
            parts[name, dtype_name(local(held.tensor)), _float(held.options.get("weight_decay"))].append(held)
        for (name, _, _), members in parts.items():
            yield _stepped(witness, each, name, members, shapes)


def _name(witness: Witness, held: _Held, optimizer: str) -> str:
    link = witness.links.get(id(held.tensor))
    return witness.live.get(id(held.tensor)) or (link.name if link else f"{optimizer} parameter {held.place}")


def _stepped(
    witness: Witness, stepping: Stepping, name: str, members: Sequence[_Held], shapes: Mapping[int, int]
) -> SteppedTensor:
    first = members[0]
    tensor, options = local(first.tensor), first.options
    link = witness.links.get(id(first.tensor))
    is_live = witness.is_live(first.tensor)
    stands_for = tensor if is_live else (local(link.live) if link is not None and link.live is not None else None)
    tensors = {key: local(value) for key, value in first.state.items() if isinstance(value, Tensor)}
    covered = link.covers if link is not None else ((name, id(first.tensor)),)
    step = first.state.get("step", options.get("step"))
    return SteppedTensor(
        name=name,
        optimizer=type(stepping.optimizer).__name__,
        dtype=dtype_name(tensor),
        device=str(tensor.device),
        shape=tuple(tensor.shape),
        elements=sum(local(held.tensor).numel() for held in members),
        live=is_live,
        live_dtype=None if stands_for is None else dtype_name(stands_for),
        live_device=None if stands_for is None else str(stands_for.device),
        live_ndim=max((shapes[place] for _, place in covered if place in shapes), default=None),
        covers=tuple(covers for covers, _ in covered) if link is not None else (),
        lr=_float(options.get("lr")),
        betas=betas_of(options),
        eps=_float(options.get("eps")),
        weight_decay=_float(options.get("weight_decay")),
        gradient_dtype=first.gradient,
        state={key: dtype_name(value) for key, value in tensors.items()},
        state_devices={key: str(value.device) for key, value in tensors.items() if key != "step"},
        compensation=first.compensation,
        offload=offload(stepping.chain),
        step_count=None if step is None else float(step),
        numbers=numbers([witness.looks.get(id(held.tensor)) or Look() for held in members]),
    )


def _float(value: Any) -> float | None:
    """None of what is not a number: Adafactor's eps is a pair."""
    return float(value) if isinstance(value, (int, float, Tensor)) else None


def _opaque(witness: Witness, stepping: Sequence[Stepping]) -> Iterator[Opaque]:
    for each in stepping:
        if not is_known(each.optimizer) and not all(held.compensation for held in each.held.values()):
            reason = "its arithmetic is unknown: it may hold masters or compensate rounding where nobody can see"
            yield Opaque(optimizer=type(each.optimizer).__name__, reason=reason)
    if not stepping and witness.outermost is not None:
        innermost = optimizer_chain(witness.outermost)[-1]
        yield Opaque(optimizer=type(innermost).__name__, reason="it made no step that torch's optimizer hooks saw")


def _parameters(witness: Witness, stepping: Sequence[Stepping]) -> Iterator[LiveTensor]:
    handed = {id(tensor) for each in stepping for group in each.optimizer.param_groups for tensor in group["params"]}
    handed |= {place for each in stepping for place in each.held}
    handed |= {place for link in witness.links.values() for _, place in link.covers}
    for model in witness.around.models:
        shapes = dimensions(model)
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is None:
                    continue
                held = local(parameter)
                yield LiveTensor(
                    name=own_name(f"{prefix}.{name}" if prefix else name),
                    dtype=dtype_name(held),
                    device=str(held.device),
                    elements=held.numel(),
                    ndim=shapes.get(id(parameter)),
                    trainable=parameter.requires_grad,
                    gradient=witness.sizes.dtype("gradient", parameter),
                    linked=id(parameter) in handed,
                    module=type(module).__name__,
                )


def _strangers(witness: Witness, stepping: Sequence[Stepping]) -> Iterator[str]:
    known = {*witness.live, *(id(link.stepped) for link in witness.links.values())}
    for each in stepping:
        handed = [tensor for group in each.optimizer.param_groups for tensor in group["params"]]
        for place, tensor in enumerate(handed):
            if tensor.requires_grad and id(tensor) not in known and id(tensor) not in each.held:
                yield f"{type(each.optimizer).__name__} parameter {place}"


def _buffers(witness: Witness) -> Iterator[LiveTensor]:
    for model in witness.around.models:
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001
                if buffer is not None:
                    yield LiveTensor(
                        name=own_name(f"{prefix}.{name}" if prefix else name),
                        dtype=dtype_name(buffer),
                        device=str(buffer.device),
                        elements=buffer.numel(),
                        ndim=buffer.ndim,
                        module=type(module).__name__,
                    )


def _course(notes: StepNotes) -> StepCourse:
    return StepCourse(
        step=notes.step,
        micro_batches=notes.micro_batches,
        rates={name: tuple(rates) for name, rates in notes.rates.items()},
        schedule_rates=notes.schedule_rates,
        schedule_steps=notes.schedule_steps,
        reported_norm=None if notes.norm is None else float(notes.norm[0]),
        max_norm=None if notes.norm is None else notes.norm[1],
        stepped_norm=notes.stepped_norm,
    )


def _schedules(witness: Witness, stepping: Sequence[Stepping]) -> Iterator[Schedule]:
    links = [link for each in stepping for link in each.chain]
    groups = {id(group) for link in links for group in getattr(link, "param_groups", ())}
    for name, schedule in _named(witness.around.schedules):
        optimizer = getattr(schedule, "optimizer", None)
        own = {id(group) for group in getattr(optimizer, "param_groups", ())}
        reaches = any(optimizer is link for link in links) or bool(own & groups)
        yield Schedule(name=name, optimizer=type(optimizer).__name__, reaches=reaches if stepping else None)


def _named(schedules: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """By class, numbered where there are several of one."""
    seen: dict[str, int] = {}
    for schedule in schedules:
        kind = type(schedule).__name__
        seen[kind] = seen.get(kind, 0) + 1
        yield (kind if seen[kind] == 1 else f"{kind} {seen[kind]}"), schedule


def _scaler(witness: Witness, model: nn.Module | None) -> Scaler | None:
    calls = witness.calls
    if calls.scaler is not None:
        return Scaler(name=calls.scaler, steps=calls.scaled_steps, skipped=calls.skipped)
    if callable(fp16 := getattr(model, "fp16_enabled", None)) and fp16():  # a DeepSpeed engine
        return Scaler(
            name="DeepSpeed", steps=int(getattr(model, "global_steps", 0)), skipped=int(getattr(model, "skipped_steps", 0))
        )
    return None


def _default_decay(stepping: Stepping) -> float | None:
    return _float(stepping.optimizer.defaults.get("weight_decay"))


def _missing(witness: Witness, stepping: Sequence[Stepping], model: nn.Module | None) -> dict[str, str]:
    missing: dict[str, str] = {}
    if not stepping:
        missing |= dict.fromkeys(
            ("stepped", "options", "numbers", "links", "gradients", "steps", "schedule", "prepared"), _NO_STEP
        )
        if witness.calls.scaler is None:
            missing["scaler"] = _NO_STEP
    if model is None:
        missing |= dict.fromkeys(("links", "parameters", "buffers", "setup"), "no model was found around the optimizer")
    if witness.operations.missing is not None:
        missing |= dict.fromkeys(("collectives", "products"), witness.operations.missing)
    if witness.forward.autocast is None:
        missing["autocast"] = "no forward pass was seen"
    if all(notes.norm is None for notes in witness.notes):
        missing["clip"] = "no clipping was seen"
    if not witness.around.schedules:
        missing["schedule"] = "no learning-rate schedule was found"
    return missing


def _size(model: nn.Module) -> int:
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
