"""What is really running, read from live objects.

This module does not know which backend was asked for. A set-up that silently became another one (accelerate ignores its
plugins under `cpu=True` and runs DDP; FSDP1's hybrid strategy fell back to NO_SHARD) is therefore seen as what it became.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The backend as found.

    `sharding` is the strategy, placements or partitioning read from the wrappers; `shard_numel` counts the elements this rank's
    optimizer steps, `total_numel` those of the whole policy.
    """

    backend: str
    model_class: str
    optimizer_chain: list[str]
    sharding: str | None
    shard_numel: int
    total_numel: int
    world_size: int
    device: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def observe(model: nn.Module, optimizer: Any, device: torch.device) -> Observed:
    """Look at a prepared model and optimizer."""
    chain = optimizer_chain(optimizer)
    backend, sharding = _identify(model, chain)
    return Observed(
        backend=backend,
        model_class=type(model).__name__,
        optimizer_chain=[type(link).__name__ for link in chain],
        sharding=sharding,
        shard_numel=_stepped_numel(chain),
        total_numel=_total_numel(model),
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
    )


def optimizer_chain(optimizer: Any) -> list[Any]:
    """The optimizer and everything it wraps, outermost first, following `.optimizer` and `.inner`."""
    chain: list[Any] = []
    while optimizer is not None and all(optimizer is not link for link in chain):
        chain.append(optimizer)
        optimizer = getattr(optimizer, "optimizer", None) or getattr(optimizer, "inner", None)
    return chain


def _identify(model: nn.Module, chain: list[Any]) -> tuple[str, str | None]:
    zero = next((link for link in chain if type(link).__name__.startswith("DeepSpeedZeroOptimizer")), None)
    if zero is not None:
        return _identify_zero(zero)
    if type(model).__name__ == "DeepSpeedEngine":
        return "deepspeed, no ZeRO", None
    if isinstance(model, FullyShardedDataParallel):
        return _identify_fsdp1(model)
    if isinstance(model, FSDPModule):
        return _identify_fsdp2(model)
    if isinstance(model, DistributedDataParallel):
        return "ddp", "replicated"
    if dist.is_initialized() and dist.get_world_size() > 1:
        return "unwrapped", "nothing reduces gradients over ranks"
    return "single", None


def _identify_zero(zero: Any) -> tuple[str, str]:
    ranks = dist.get_world_size()
    if type(zero).__name__.endswith("Stage3"):
        return "zero3", f"parameters, gradients and optimizer state partitioned over {ranks} ranks"
    if zero.partition_gradients:
        return "zero2", f"gradients and optimizer state partitioned over {ranks} ranks"
    return "zero1", f"optimizer state partitioned over {ranks} ranks"


def _identify_fsdp1(model: nn.Module) -> tuple[str, str]:
    units = FullyShardedDataParallel.fsdp_modules(model)
    # The handle holds the strategy in force; the wrapper's argument is only what was asked for.
    strategies = {unit._handle._sharding_strategy.name for unit in units if unit._handle is not None}  # noqa: SLF001
    names = {
        "FULL_SHARD": "fsdp1_full",
        "SHARD_GRAD_OP": "fsdp1_grad_op",
        "HYBRID_SHARD": "fsdp1_hybrid",
        "_HYBRID_SHARD_ZERO2": "fsdp1_hybrid_grad_op",
        "NO_SHARD": "fsdp1_no_shard",
    }
    found = sorted(names[strategy] for strategy in strategies)
    sharding = f"{', '.join(sorted(strategies))} in {len(units)} units"
    return (found[0] if len(found) == 1 else "fsdp1, mixed: " + ", ".join(found)), sharding


def _identify_fsdp2(model: nn.Module) -> tuple[str, str]:
    layouts = {
        (tuple(str(placement) for placement in parameter.placements), tuple(parameter.device_mesh.shape))
        if isinstance(parameter, DTensor)
        else (("plain",), ())
        for parameter in model.parameters()
    }
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    sharding = (
        "; ".join(f"{', '.join(placements)} on mesh {shape}" for placements, shape in sorted(layouts)) + f" in {units} units"
    )
    if len(layouts) != 1:
        return "fsdp2, mixed", sharding
    (placements, _) = next(iter(layouts))
    kinds = tuple(placement.split("(")[0].lower() for placement in placements)
    if kinds in {("shard",), ("s",)}:
        return "fsdp2", sharding
    if len(kinds) == 2 and kinds[0] in {"replicate", "r"} and kinds[1] in {"shard", "s"}:
        return "hsdp", sharding
    return "fsdp2, unknown layout", sharding


def _stepped_numel(chain: list[Any]) -> int:
    """Elements held on this rank by the optimizer that steps."""
    zero = next((link for link in chain if type(link).__name__.startswith("DeepSpeedZeroOptimizer")), None)
    partitions = getattr(zero, "single_partition_of_fp32_groups", None) or getattr(zero, "fp32_partitioned_groups_flat", None)
    if partitions is None:
        partitions = [parameter for group in chain[-1].param_groups for parameter in group["params"]]
    return sum(_local(partition).numel() for partition in partitions)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _total_numel(model: nn.Module) -> int:
    """Trainable elements of the whole policy, whatever this rank holds of them."""
    if isinstance(model, FullyShardedDataParallel):
        held = torch.tensor(sum(p.numel() for p in model.parameters() if p.requires_grad), dtype=torch.int64)
        unit = FullyShardedDataParallel.fsdp_modules(model)[0]
        if unit._handle is not None and unit._handle.uses_sharded_strategy:  # noqa: SLF001
            held = held.to(unit.compute_device)
            dist.all_reduce(held, group=unit.process_group)
        return int(held.item())
    # ZeRO-3 leaves empty parameters that remember their size
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
