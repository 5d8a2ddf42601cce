"""The backend that really runs, read from live objects and never from the configuration.

The observer identifies the built-in backends by their wrappers. The recognisers of registered backends are asked after it, all
of them whichever backend was requested: a set-up that only one of them claims runs that backend, and a set-up that none claims
runs the built-in one. A requested backend that fell back to another is therefore reported as what it became.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from benchbox.errors import ConfigurationError, MismatchError, Problem
from benchbox.observer.introspect.tensors import local_shard
from benchbox.observer.introspect.wrappers import fsdp1_handles, identify_backend, optimizer_chain, world_size, zero_optimizer
from benchbox.registry.backends import BackendInfo, backends

if TYPE_CHECKING:
    from benchbox.registry.launch_record import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observation of a prepared model and optimizer.

    `sharding` is the strategy, placements or partitioning read from the wrappers; `shard_numel` counts the elements that this
    rank's optimizer steps, `trainable_numel` those of the policy that train, over all ranks, and `total_numel` all it has.
    `settings` are those of the backend that can tilt a comparison, by name.
    """

    backend: str
    model_class: str
    optimizer_chain: list[str]
    sharding: str | None
    shard_numel: int
    trainable_numel: int
    total_numel: int
    world_size: int
    device: str
    settings: dict[str, Setting] = field(default_factory=dict)


def observe(model: nn.Module, optimizer: Any, device: torch.device) -> Observed:
    """Observe a prepared model and optimizer.

    Raises:
        MismatchError: several registered backends claim them.
        ConfigurationError: the recogniser of a registered backend cannot be imported, or fails.
    """
    chain = optimizer_chain(optimizer)
    backend, sharding = _identify(model, chain)
    trainable, total = _policy_numel(model)
    return Observed(
        backend=backend,
        model_class=type(model).__name__,
        optimizer_chain=[type(link).__name__ for link in chain],
        sharding=sharding,
        shard_numel=_stepped_numel(chain),
        trainable_numel=trainable,
        total_numel=total,
        world_size=world_size(),
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
    )


def _identify(model: nn.Module, chain: list[Any]) -> tuple[str, str | None]:
    """Return (backend, sharding): those of the registered backend that claims these objects, else of the built-in one."""
    structure, sharding = identify_backend(model, chain)
    claims: dict[str, str] = {}
    for info in backends().values():
        if info.recognise is not None and (description := _claimed_sharding(info, model, chain)) is not None:
            claims[info.name] = description
    if not claims:
        return structure, sharding
    if len(claims) > 1:
        listed = "; ".join(f"{name}: {description}" for name, description in claims.items())
        raise MismatchError(f"{type(model).__name__} is claimed by the recognisers of several backends ({listed})")
    ((name, description),) = claims.items()
    # The structure stays in the record: it shows what the claim is about, even where a recogniser claims too much.
    return name, f"{description} (structure: {structure}{f', {sharding}' if sharding else ''})"


def _claimed_sharding(info: BackendInfo, model: nn.Module, chain: list[Any]) -> str | None:
    """Return the description of the sharding if the backend recognises these objects as its own."""
    recogniser = info.load_recogniser()
    try:
        description = recogniser(model, list(chain))
    except Exception as error:
        problem = f"{info.recognise} failed on {type(model).__name__}: {type(error).__name__}: {error}"
        raise ConfigurationError(
            Problem(f"backend {info.name}", problem, "it must return None for what it does not know")
        ) from error
    if not isinstance(description, str | None):
        problem = f"{info.recognise} returned {description!r} for {type(model).__name__}"
        raise ConfigurationError(Problem(f"backend {info.name}", problem, "it must return a description or None"))
    return description


def _stepped_numel(chain: list[Any]) -> int:
    """Return the number of elements that the stepping optimizer holds on this rank."""
    zero = zero_optimizer(chain)
    partitions = getattr(zero, "single_partition_of_fp32_groups", None) or getattr(zero, "fp32_partitioned_groups_flat", None)
    if partitions is None:
        partitions = [parameter for group in chain[-1].param_groups for parameter in group["params"]]
    return sum(local_shard(partition).numel() for partition in partitions)


def _policy_numel(model: nn.Module) -> tuple[int, int]:
    """Return (trainable, all) elements of the unsharded policy, whatever this rank holds of them."""
    # ZeRO-3 leaves empty parameters that remember their size in `ds_numel`.
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    counts = torch.tensor(
        [sum(numel for numel, trains in sizes if trains), sum(numel for numel, _ in sizes)], dtype=torch.int64
    )
    handle = next(iter(fsdp1_handles(model)), None)
    if handle is not None and handle.uses_sharded_strategy:
        counts = counts.to(handle.device)
        dist.all_reduce(counts, group=handle.process_group)
    trainable, total = counts.tolist()
    return trainable, total
