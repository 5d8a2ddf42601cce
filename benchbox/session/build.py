"""Construction of a session from a cell: the policy in float32, on the meta device, then prepared by its backend and recipe."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchbox.backends.base import StepShape
from benchbox.backends.deferred import deferred_weights
from benchbox.backends.device import rank_device
from benchbox.data.loading.loader import open_stream
from benchbox.errors import UnsupportedError
from benchbox.observer.introspect.names import live_parameters
from benchbox.optim import freeze
from benchbox.registry.backends import DEFAULT_SHARD_SIZE, backend_info
from benchbox.registry.contracts import Axes
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.registry.recipes import recipe_by_name
from benchbox.registry.refusals import cell_refusal
from benchbox.session.compilation import compile_policy
from benchbox.session.construction import construct_policy, seed_rank
from benchbox.session.step import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.backends.base import Backend
    from benchbox.data.loading.loader import MicroBatchStream, SampleSource
    from benchbox.registry.contracts import BatchSpec, Policy
    from benchbox.registry.weights import LoadedWeights
    from benchbox.spec.cell import Cell

Statistics = Sequence[Mapping[str, Mapping[str, list[float]]]]


def build_cell_policy(cell: Cell, policy_dirs: Sequence[Path] = ()) -> Policy:
    """Build the policy of a cell in float32 on the meta device, with a record of how its weights are computed from the seed.

    Where its code cannot run there, the policy is built directly (`benchbox.session.construction`). Else the backend computes
    the weights in `build_session`: the same on every rank and with every backend, bit for bit those of direct construction on
    the rank's device (`benchbox.backends.deferred`). The device of this rank becomes the current one before `open_cell_data`
    starts the thread that pins memory. Started earlier, the thread of every rank would work on device 0, and hold memory there
    for a CUDA context of its own.

    Raises:
        ConfigurationError: there is no such policy or size.
        UnsupportedError: there are fewer GPUs than ranks, or the device or the policy lacks the attention kernel.
    """
    device = rank_device()
    if cell.attention == "flex" and device.type == "cpu":
        raise UnsupportedError("FlexAttention has no backward on a CPU: choose sdpa or eager")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    axes = Axes(cams=cell.cams, attention=cell.attention, checkpointing=cell.checkpointing, mode=cell.data.mode)
    return construct_policy(cell, axes, device, policy_dirs)


def copy_meta_policy(cell: Cell, policy: Policy) -> Policy | None:
    """Return a copy of the policy from `build_cell_policy`, frozen as the cell says, for its formula of FLOPs if it has one.

    The copy has no weights, also that of a policy which was built on the device.
    """
    if not hasattr(policy, "work"):
        return None
    assert isinstance(policy, nn.Module)
    copies: dict[int, object] = {id(tensor): _on_meta(tensor) for tensor in (*policy.parameters(), *policy.buffers())}
    meta_policy = deepcopy(policy, copies)
    assert isinstance(meta_policy, nn.Module)
    freeze(meta_policy, meta_policy.parameter_roles(), FREEZE_PRESETS[cell.freeze])
    return meta_policy


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor or parameter of the same shape and dtype, without values."""
    values = tensor.detach().to("meta")
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def open_cell_data(cell: Cell, policy: Policy, rank: int, *, start_step: int = 0, on_host: bool = False) -> MicroBatchStream:
    """Open the micro-batches of this rank, in the form that the policy needs, from optimizer step `start_step` on. Close it.

    They are copied to the GPU, where there is one, unless they are to stay `on_host`.

    Raises:
        ConfigurationError: the data cannot be brought into the form that the policy needs.
        DataError: the dataset is missing or damaged.
        UnsupportedError: padding is to be left out, and the policy declares no part of its batches for which that may be.
    """
    own_samples = generated_samples(cell, policy)
    spec = policy.batch_spec() if own_samples is None else None
    return open_stream(
        cell.data,
        spec,
        batch=cell.batch,
        accumulation=cell.accumulation,
        rank=rank,
        world_size=cell.world_size,
        seed=cell.seed,
        order=cell.order,
        start_step=start_step,
        own_samples=own_samples,
        on_host=on_host,
        trimmable=trimmable_parts(cell, spec),
    )


def generated_samples(cell: Cell, policy: Policy) -> SampleSource | None:
    """Return the samples that the policy itself generates; None for one that reads those of the cell's data."""
    if cell.data.kind != "synthetic" or not hasattr(policy, "own_samples"):
        return None
    samples: SampleSource | None = policy.own_samples(cell.seed)
    return samples


def trimmable_parts(cell: Cell, spec: BatchSpec | None) -> tuple[str, ...]:
    """Return the parts of a micro-batch whose common padding is left out; none where the cell asks for full padding.

    Args:
        spec: None for a policy that generates its samples.

    Raises:
        UnsupportedError: padding is to be left out, and the policy declares no part for which that may be.
    """
    if cell.padding == "full":
        return ()
    if spec is None or not spec.trimmable:
        message = f"{cell.policy} declares no part of its batches whose padding may be left out (BatchSpec.trimmable)"
        raise UnsupportedError(f"{message}: write padding: full")
    return spec.trimmable


def build_session(
    cell: Cell, policy: Policy, statistics: Statistics, enter_stage: Callable[[str], None] = lambda _: None
) -> Session:
    """Prepare a policy for the backend and recipe of a cell: load its weights, freeze, shard, and build the optimizer.

    Args:
        policy: from `build_cell_policy`, or built on the rank's device. It is wrapped, sharded or cast in place.
        statistics: one mapping feature -> statistic -> values for each dataset, for the policy's normalisation buffers.
        enter_stage: see `Backend.enter_stage`.

    Raises:
        UnsupportedError: the backend cannot run this cell, the policy cannot be frozen in this way, or it cannot load
            published weights; the message says why.
        ConfigurationError: the weights are of another policy.
        DataError: they are missing or damaged.
    """
    assert isinstance(policy, nn.Module)
    backend: Backend = backend_info(cell.backend).load()()
    refusal = cell_refusal(cell)
    if refusal is not None:
        raise UnsupportedError(refusal)
    backend.enter_stage = enter_stage
    os.environ.update(backend.environment())
    weights = deferred_weights(policy)
    with nullcontext() if weights is None else weights.recording():
        loaded = load_cell_weights(cell, policy)
        freeze(policy, policy.parameter_roles(), FREEZE_PRESETS[cell.freeze])
        policy.load_statistics(list(statistics))
        _make_contiguous(policy)
    if weights is not None:
        weights.bind(policy)  # again, because tensors may have been replaced
    return prepare_session(cell, policy, backend, loaded)


def _make_contiguous(policy: nn.Module) -> None:
    """Lay out parameters row by row: FSDP2 and DeepSpeed refuse others, and FSDP1 has their elements in another order.

    Raises:
        UnsupportedError: one of them is a view of another, from which it would be separated.
    """
    named = dict(live_parameters(policy))
    sharers = Counter(parameter.untyped_storage()._cdata for parameter in named.values())  # noqa: SLF001 (the storage's address)
    for name, parameter in named.items():
        if parameter.is_contiguous():
            continue
        if sharers[parameter.untyped_storage()._cdata] > 1:  # noqa: SLF001
            raise UnsupportedError(f"{name} is a view of another parameter: use that one, and transpose it in forward")
        parameter.data = parameter.data.contiguous()


def prepare_session(cell: Cell, policy: Policy, backend: Backend, loaded: LoadedWeights | None = None) -> Session:
    """Let a backend shard a policy that is loaded and frozen, and build its optimizer; return the session that steps both.

    The random generators are then those of this rank: dropout, and noise that a policy draws, are not the same on every rank.

    Raises:
        UnsupportedError: the policy cannot be compiled in this way.
    """
    compile_policy(policy, cell.compile)
    shape = StepShape(
        batch=cell.batch,
        accumulation=cell.accumulation,
        max_grad_norm=cell.optim.max_grad_norm,
        shard_size=cell.shard_size or DEFAULT_SHARD_SIZE,
    )
    backend.prepare(policy, recipe_by_name(cell.recipe), cell.optim, shape)
    seed_rank(cell.seed)
    return Session(backend, accumulation=cell.accumulation, loaded=loaded, optim=cell.optim)


def load_cell_weights(cell: Cell, policy: Policy) -> LoadedWeights | None:
    """Load the published weights that a cell names, if any.

    Raises:
        UnsupportedError: the policy reads no published weights.
        DataError: they are missing or damaged.
    """
    if cell.weights is None:
        return None
    if not hasattr(policy, "load_weights"):
        raise UnsupportedError(f"{type(policy).__name__} reads no published weights")
    return policy.load_weights(Path(cell.weights))
