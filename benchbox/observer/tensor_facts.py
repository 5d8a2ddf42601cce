"""The tensors of a training as facts: those that are stepped, those of the model, and what they have to do with each other."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .facts import LiveTensor, OpaqueOptimizer, SteppedTensor
from .introspect.names import dimensions, is_known, offload, unwrapped_name
from .introspect.tensors import dtype_name, local_shard
from .introspect.wrappers import optimizer_chain
from .numerics.expected_update import betas_of, is_decoupled
from .numerics.probes import Look, numbers
from .state import tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .state import Held, Notebook, Stepping


def stepped_tensors(book: Notebook, stepping: Sequence[Stepping]) -> Iterator[SteppedTensor]:
    """One entry a parameter: a large one may be stepped in parts."""
    shapes = {place: count for model in book.around.models for place, count in dimensions(model).items()}
    for each in stepping:
        parts: dict[tuple[Any, ...], list[Held]] = defaultdict(list)
        for held in each.held.values():
            name = _name(book, held, type(each.optimizer).__name__)
            parts[name, dtype_name(local_shard(held.tensor)), float_or_none(held.options.get("weight_decay"))].append(held)
        for (name, _, _), members in parts.items():
            yield _stepped(book, each, name, members, shapes)


def _name(book: Notebook, held: Held, optimizer: str) -> str:
    link = book.links.get(id(held.tensor))
    return book.live.get(id(held.tensor)) or (link.name if link else f"{optimizer} parameter {held.place}")


def _stepped(
    book: Notebook, stepping: Stepping, name: str, members: Sequence[Held], shapes: Mapping[int, int]
) -> SteppedTensor:
    first = members[0]
    tensor, options = local_shard(first.tensor), first.options
    link = book.links.get(id(first.tensor))
    is_live = book.is_live(first.tensor)
    stands_for = tensor if is_live else (local_shard(link.live) if link is not None and link.live is not None else None)
    tensors = {key: local_shard(value) for key, value in first.state.items() if isinstance(value, Tensor)}
    covered = link.covers if link is not None else ((name, id(first.tensor)),)
    step = first.state.get("step", options.get("step"))
    return SteppedTensor(
        name=name,
        optimizer=type(stepping.optimizer).__name__,
        dtype=dtype_name(tensor),
        device=str(tensor.device),
        shape=tuple(tensor.shape),
        elements=sum(local_shard(held.tensor).numel() for held in members),
        live=is_live,
        live_dtype=None if stands_for is None else dtype_name(stands_for),
        live_device=None if stands_for is None else str(stands_for.device),
        live_ndim=max((shapes[place] for _, place in covered if place in shapes), default=None),
        covers=tuple(covers for covers, _ in covered) if link is not None else (),
        lr=float_or_none(options.get("lr")),
        betas=betas_of(options),
        eps=float_or_none(options.get("eps")),
        weight_decay=float_or_none(options.get("weight_decay")),
        decoupled_decay=is_decoupled(stepping.optimizer, options),
        gradient_dtype=first.gradient,
        state={key: dtype_name(value) for key, value in tensors.items()},
        state_devices={key: str(value.device) for key, value in tensors.items() if key != "step"},
        compensation=first.compensation,
        offload=offload(stepping.chain),
        step_count=None if step is None else float(step),
        numbers=numbers([book.looks.get(id(held.tensor)) or Look() for held in members]),
    )


def float_or_none(value: Any) -> float | None:
    """None of what is not a number: Adafactor's eps is a pair."""
    return float(value) if isinstance(value, (int, float, Tensor)) else None


def opaque(book: Notebook, stepping: Sequence[Stepping]) -> Iterator[OpaqueOptimizer]:
    for each in stepping:
        if not is_known(each.optimizer) and not all(held.compensation for held in each.held.values()):
            reason = "its arithmetic is unknown: it may hold masters or compensate rounding where nobody can see"
            yield OpaqueOptimizer(optimizer=type(each.optimizer).__name__, reason=reason)
    if not stepping and book.outermost is not None:
        innermost = optimizer_chain(book.outermost)[-1]
        yield OpaqueOptimizer(optimizer=type(innermost).__name__, reason="it made no step that torch's optimizer hooks saw")


def parameters(book: Notebook) -> Iterator[LiveTensor]:
    handed = book.handed()
    for model in book.around.models:
        shapes = dimensions(model)
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is None:
                    continue
                held = local_shard(parameter)
                yield LiveTensor(
                    name=unwrapped_name(f"{prefix}.{name}" if prefix else name),
                    dtype=dtype_name(held),
                    device=str(held.device),
                    elements=held.numel(),
                    ndim=shapes.get(id(parameter)),
                    trainable=parameter.requires_grad,
                    gradient=book.sizes.dtype("gradient", parameter),
                    linked=id(parameter) in handed or (None if id(parameter) in book.bystanders.moved else False),
                    module=type(module).__name__,
                )


def strangers(book: Notebook, stepping: Sequence[Stepping]) -> Iterator[str]:
    known = {*book.live, *(id(link.stepped) for link in book.links.values())}
    for each in stepping:
        for place, tensor in enumerate(tensors_of(each.optimizer)):
            if tensor.requires_grad and id(tensor) not in known and id(tensor) not in each.held:
                yield f"{type(each.optimizer).__name__} parameter {place}"


def buffers(book: Notebook) -> Iterator[LiveTensor]:
    for model in book.around.models:
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001
                if buffer is not None:
                    yield LiveTensor(
                        name=unwrapped_name(f"{prefix}.{name}" if prefix else name),
                        dtype=dtype_name(buffer),
                        device=str(buffer.device),
                        elements=buffer.numel(),
                        ndim=buffer.ndim,
                        module=type(module).__name__,
                    )
