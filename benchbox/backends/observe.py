"""What is really running, read from live objects and never from the configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchbox.observer.introspect.wrappers import fsdp1_handles, identify, optimizer_chain, ranks, zero_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The backend as found.

    `sharding` is the strategy, placements or partitioning read from the wrappers; `shard_numel` counts the elements this rank's
    optimizer steps, `trainable_numel` and `total_numel` those of the whole policy that train and that there are.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def observe(model: nn.Module, optimizer: Any, device: torch.device) -> Observed:
    """Look at a prepared model and optimizer."""
    chain = optimizer_chain(optimizer)
    backend, sharding = identify(model, chain)
    trainable, total = _numel(model)
    return Observed(
        backend=backend,
        model_class=type(model).__name__,
        optimizer_chain=[type(link).__name__ for link in chain],
        sharding=sharding,
        shard_numel=_stepped_numel(chain),
        trainable_numel=trainable,
        total_numel=total,
        world_size=ranks(),
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
    )


def _stepped_numel(chain: list[Any]) -> int:
    """Elements held on this rank by the optimizer that steps."""
    zero = zero_optimizer(chain)
    partitions = getattr(zero, "single_partition_of_fp32_groups", None) or getattr(zero, "fp32_partitioned_groups_flat", None)
    if partitions is None:
        partitions = [parameter for group in chain[-1].param_groups for parameter in group["params"]]
    return sum(_local(partition).numel() for partition in partitions)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _numel(model: nn.Module) -> tuple[int, int]:
    """Elements of the whole policy, whatever this rank holds of them: (trainable, all)."""
    # ZeRO-3 leaves empty parameters that remember their size
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    held = torch.tensor([sum(numel for numel, trains in sizes if trains), sum(numel for numel, _ in sizes)], dtype=torch.int64)
    handle = next(iter(fsdp1_handles(model)), None)
    if handle is not None and handle.uses_sharded_strategy:
        held = held.to(handle.device)
        dist.all_reduce(held, group=handle.process_group)
    trainable, total = held.tolist()
    return trainable, total
