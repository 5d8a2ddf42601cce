"""Facts of tensors: those that optimizers step, those of the models, and the links between them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .facts import LiveTensor, OpaqueOptimizer, SteppedTensor
from .introspect.masters import declared_offload, has_known_arithmetic
from .introspect.names import owned_tensors, parameter_ndims
from .introspect.tensors import dtype_name, is_plain, local_shard
from .introspect.wrappers import optimizer_chain
from .numerics.expected_update import adam_betas, float_or_none, has_decoupled_decay, is_fused
from .numerics.probes import TensorProbe, update_statistics
from .state import optimizer_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .state import ObservedOptimizer, ObserverState, TensorSnapshot

_LOSSLESS = frozenset({"float32", "float64", "complex64", "complex128"})


def stepped_tensor_facts(state: ObserverState, optimizers: Sequence[ObservedOptimizer]) -> Iterator[SteppedTensor]:
    """Yield one entry per parameter. A large parameter may be stepped in parts, which are merged.

    Parameters of several models may have the same name, and are not parts of one.
    """
    ndims = {key: ndim for model in state.objects.models for key, ndim in parameter_ndims(model).items()}
    for observed in optimizers:
        parts: dict[tuple[Any, ...], list[TensorSnapshot]] = defaultdict(list)
        for snapshot in observed.snapshots.values():
            name = _stepped_name(state, snapshot, observed.name)
            decay = float_or_none(snapshot.options.get("weight_decay"))
            parameter_ids = frozenset(state.covered_ids(id(snapshot.tensor)) - {id(snapshot.tensor)} or {id(snapshot.tensor)})
            parts[name, dtype_name(local_shard(snapshot.tensor)), decay, parameter_ids].append(snapshot)
        for (name, *_), snapshots in parts.items():
            yield _stepped_tensor(state, observed, name, snapshots, ndims)


def _stepped_name(state: ObserverState, snapshot: TensorSnapshot, optimizer: str) -> str:
    link = state.links.get(id(snapshot.tensor))
    live_name = state.live_names.get(id(snapshot.tensor))
    return live_name or (link.name if link else f"{optimizer} parameter {snapshot.index}")


def _stepped_tensor(
    state: ObserverState,
    observed: ObservedOptimizer,
    name: str,
    parts: Sequence[TensorSnapshot],
    ndims: Mapping[int, int],
) -> SteppedTensor:
    snapshot = parts[0]
    tensor, options = local_shard(snapshot.tensor), snapshot.options
    link = state.links.get(id(snapshot.tensor))
    is_live = state.is_live(snapshot.tensor)
    live = tensor if is_live else (local_shard(link.live) if link is not None and link.live is not None else None)
    state_tensors = {key: local_shard(value) for key, value in snapshot.optimizer_state.items() if isinstance(value, Tensor)}
    covers = link.covers if link is not None else ((name, id(snapshot.tensor)),)
    step = snapshot.optimizer_state.get("step", options.get("step"))
    return SteppedTensor(
        name=name,
        optimizer=observed.name,
        dtype=dtype_name(tensor),
        device=str(tensor.device),
        shape=tuple(tensor.shape),
        elements=sum(local_shard(part.tensor).numel() for part in parts),
        live=is_live,
        live_dtype=None if live is None else dtype_name(live),
        live_device=None if live is None else str(live.device),
        live_ndim=max((ndims[parameter_id] for _, parameter_id in covers if parameter_id in ndims), default=None),
        covers=tuple(parameter for parameter, _ in covers) if link is not None else (),
        lr=float_or_none(options.get("lr")),
        betas=adam_betas(options),
        eps=float_or_none(options.get("eps")),
        weight_decay=float_or_none(options.get("weight_decay")),
        decoupled_decay=has_decoupled_decay(observed.optimizer, options),
        fused=is_fused(observed.optimizer, options),
        gradient_dtype=snapshot.gradient_dtype,
        state={key: dtype_name(value) for key, value in state_tensors.items()},
        # Numbers for the whole tensor, as step and NAdam's mu_product, are kept on the CPU on purpose.
        state_devices={key: str(value.device) for key, value in state_tensors.items() if value.ndim},
        compensation=snapshot.compensation,
        offload=declared_offload(observed.chain),
        step_count=float_or_none(step),
        numbers=update_statistics([state.probes.get(id(part.tensor)) or TensorProbe() for part in parts]),
    )


def opaque_facts(state: ObserverState, optimizers: Sequence[ObservedOptimizer]) -> Iterator[OpaqueOptimizer]:
    """Yield the optimizers whose arithmetic is unknown, or that stepped without torch's optimizer hooks."""
    for observed in optimizers:
        snapshots = observed.snapshots.values()
        if has_known_arithmetic(observed.optimizer):
            continue
        if not snapshots:
            yield OpaqueOptimizer(optimizer=observed.name, reason="it was called without gradients: what it steps is unknown")
        elif not all(snapshot.compensation for snapshot in snapshots):
            lossless = all(_takes_any_update(state, snapshot.tensor) for snapshot in snapshots)
            reason = (
                "its arithmetic is unknown: lost updates, pinned parameters and clipping are not judged"
                if lossless
                else "its arithmetic is unknown: it may hold masters or compensate rounding where nobody can see"
            )
            yield OpaqueOptimizer(optimizer=observed.name, reason=reason, lossless=lossless)
    if not optimizers and state.outermost_optimizer is not None:
        innermost = optimizer_chain(state.outermost_optimizer)[-1]
        reason = "it made no step that torch's optimizer hooks saw"
        yield OpaqueOptimizer(optimizer=type(innermost).__name__, reason=reason)


def _takes_any_update(state: ObserverState, tensor: Tensor) -> bool:
    """Return whether a model computes with this very tensor, and each of its numbers has 32 bits or more."""
    shard = local_shard(tensor)
    return state.is_live(tensor) and is_plain(shard) and dtype_name(shard) in _LOSSLESS


def parameter_facts(state: ObserverState) -> Iterator[LiveTensor]:
    """Yield the parameters of the models."""
    optimized = state.optimized_ids()
    for model in state.objects.models:
        ndims = parameter_ndims(model)
        for name, parameter, module in owned_tensors(model, "_parameters"):
            shard = local_shard(parameter)
            # A parameter that moves although no optimizer was seen to step it may be linked.
            unstepped_link = None if id(parameter) in state.unstepped.moved else False
            yield LiveTensor(
                name=name,
                dtype=dtype_name(shard),
                device=str(shard.device),
                elements=shard.numel(),
                ndim=ndims.get(id(parameter)),
                trainable=parameter.requires_grad,
                gradient=state.census.dtype("gradient", parameter),
                linked=id(parameter) in optimized or unstepped_link,
                unmoved_steps=state.unstepped.unmoved_steps(parameter),
                module=type(module).__name__,
            )


def buffer_facts(state: ObserverState) -> Iterator[LiveTensor]:
    """Yield the buffers of the models."""
    for model in state.objects.models:
        for name, buffer, module in owned_tensors(model, "_buffers"):
            yield LiveTensor(
                name=name,
                dtype=dtype_name(buffer),
                device=str(buffer.device),
                elements=buffer.numel(),
                ndim=buffer.ndim,
                module=type(module).__name__,
            )


def foreign_tensors(state: ObserverState, optimizers: Sequence[ObservedOptimizer]) -> Iterator[str]:
    """Yield names of trainable tensors in optimizers that were never stepped and belong to no model."""
    linked = {*state.live_names, *(id(link.stepped) for link in state.links.values())}
    for observed in optimizers:
        for index, tensor in enumerate(optimizer_tensors(observed.optimizer)):
            if tensor.requires_grad and id(tensor) not in linked and id(tensor) not in observed.snapshots:
                yield f"{observed.name} parameter {index}"
