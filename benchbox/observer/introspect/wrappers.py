"""The wrappers that shard and reduce, read from live objects.

This module does not know which backend was requested. It therefore reports the backend that really runs, also when it silently
differs from the requested one: accelerate ignores its plugins under `cpu=True` and runs DDP, and FSDP1's hybrid strategy may
fall back to NO_SHARD.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..facts import ConfiguredReduction, PreparedByAccelerate, Setup
from .tensors import has_class_named

_FSDP1_NAMES = {
    "FULL_SHARD": "fsdp1_full",
    "SHARD_GRAD_OP": "fsdp1_grad_op",
    "HYBRID_SHARD": "fsdp1_hybrid",
    "_HYBRID_SHARD_ZERO2": "fsdp1_hybrid_grad_op",
    "NO_SHARD": "fsdp1_no_shard",
}
_COMPRESSING = (("bf16_compress", torch.bfloat16), ("fp16_compress", torch.float16))


def world_size() -> int:
    """Return the number of ranks of the process group: 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def optimizer_chain(optimizer: Any) -> list[Any]:
    """Return the optimizer and everything it wraps, outermost first, by following `.optimizer` and `.inner`.

    An optimizer may have something else under these names, such as a number of inner steps: what it wraps has a `step`.
    """
    chain: list[Any] = []
    while optimizer is not None and all(optimizer is not wrapper for wrapper in chain):
        chain.append(optimizer)
        attributes = (getattr(optimizer, "optimizer", None), getattr(optimizer, "inner", None))
        optimizer = next((value for value in attributes if callable(getattr(value, "step", None))), None)
    return chain


def parameter_groups(owner: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer; none of an object with something else under that name."""
    groups = getattr(owner, "param_groups", None)
    return (
        [group for group in groups if isinstance(group, dict) and "params" in group]
        if isinstance(groups, (list, tuple))
        else []
    )


def zero_optimizer(chain: list[Any]) -> Any:
    """Return DeepSpeed's ZeRO optimizer from the chain, or None."""
    return next((optimizer for optimizer in chain if type(optimizer).__name__.startswith("DeepSpeedZeroOptimizer")), None)


def identify_backend(model: nn.Module, chain: list[Any]) -> tuple[str, str | None]:
    """Return (backend, sharding) of a wrapped model and its optimizer chain."""
    zero = zero_optimizer(chain)
    if zero is not None:
        return _identify_zero(zero)
    if any(has_class_named(optimizer, "BF16_Optimizer") for optimizer in chain):  # ZeRO-1, gradients accumulate in float32
        return "zero1", f"optimizer state partitioned over {world_size()} ranks"
    if has_class_named(model, "DeepSpeedEngine"):
        return "deepspeed, no ZeRO", None
    if fsdp1_units(model):
        return _identify_fsdp1(model)
    if any(has_class_named(module, "FSDPModule") for module in model.modules()):
        return _identify_fsdp2(model)
    if any(has_class_named(module, "DistributedDataParallel") for module in model.modules()):
        return "ddp", "replicated"
    if world_size() > 1:
        return "unwrapped", "nothing reduces gradients over ranks"
    return "single", None


def fsdp1_units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if has_class_named(module, "FullyShardedDataParallel")]


def fsdp1_handles(model: nn.Module) -> list[Any]:
    """Return the handles of FSDP1's flat parameters, which hold the sharding strategy and dtypes in force."""
    handles = [getattr(unit, "_handle", None) for unit in fsdp1_units(model)]
    return [handle for handle in handles if handle is not None]


def _identify_zero(zero: Any) -> tuple[str, str]:
    if type(zero).__name__.endswith("Stage3"):
        return "zero3", f"parameters, gradients and optimizer state partitioned over {world_size()} ranks"
    if zero.partition_gradients:
        return "zero2", f"gradients and optimizer state partitioned over {world_size()} ranks"
    return "zero1", f"optimizer state partitioned over {world_size()} ranks"


def _identify_fsdp1(model: nn.Module) -> tuple[str, str]:
    # The handle holds the strategy in force, the wrapper only the requested one.
    strategies = {handle._sharding_strategy.name for handle in fsdp1_handles(model)}  # noqa: SLF001
    names = sorted(_FSDP1_NAMES[strategy] for strategy in strategies)
    sharding = f"{', '.join(sorted(strategies))}{_hybrid_groups(model)} in {len(fsdp1_units(model))} units"
    return (names[0] if len(names) == 1 else "fsdp1, mixed: " + ", ".join(names)), sharding


def _hybrid_groups(model: nn.Module) -> str:
    """Return the sizes of the groups that a hybrid strategy shards within and replicates across, from the groups in use."""
    replicas = {group.size() for unit in fsdp1_units(model) if (group := getattr(unit, "_inter_node_pg", None)) is not None}
    if not replicas:
        return ""
    shards = {handle.process_group.size() for handle in fsdp1_handles(model)}
    return f" over {_listed(shards)} ranks, {_listed(replicas)} copies"


def _listed(sizes: set[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _identify_fsdp2(model: nn.Module) -> tuple[str, str]:
    parameters: list[Any] = list(model.parameters())
    layouts = {
        (tuple(str(placement) for placement in parameter.placements), tuple(parameter.device_mesh.shape))
        if has_class_named(parameter, "DTensor")
        else (("plain",), ())
        for parameter in parameters
    }
    # accelerate shards the wrapper of a checkpointed layer too, which has no parameters left.
    modules = [module for module in model.modules() if has_class_named(module, "FSDPModule")]
    units = sum(not has_class_named(module, "CheckpointWrapper") for module in modules)
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


def read_setup(model: nn.Module, chain: list[Any], accelerator: Any) -> Setup:
    """Return the backend of a model, and what accelerate was configured with if an Accelerator exists."""
    backend, sharding = identify_backend(model, chain)
    request = {} if accelerator is None else _read_request(accelerator)
    return Setup(backend=backend, model_class=type(model).__name__, sharding=sharding, **request)


def _read_request(accelerator: Any) -> dict[str, str | None]:
    state = getattr(accelerator, "state", None)
    request: dict[str, str | None] = {"mixed_precision": getattr(accelerator, "mixed_precision", None), "source": "accelerate"}
    # accelerate sets these variables itself when it gets a plugin, before it decides whether to use the plugin.
    for variable, family in (("ACCELERATE_USE_FSDP", "fsdp"), ("ACCELERATE_USE_DEEPSPEED", "zero")):
        if os.environ.get(variable, "false").lower() in {"true", "1"}:
            return request | {"requested": family, "source": variable}
    for plugin, family in (("fsdp_plugin", "fsdp"), ("deepspeed_plugin", "zero")):
        if getattr(state, plugin, None) is not None:
            return request | {"requested": family, "source": f"accelerate's {plugin}"}
    return request


def read_prepared(accelerator: Any, optimizers: list[Any]) -> PreparedByAccelerate:
    """Return which optimizers accelerate has wrapped.

    Args:
        accelerator: the Accelerator of the training.
        optimizers: the optimizers that step tensors themselves.
    """
    wrapped = [optimizer for wrapper in getattr(accelerator, "_optimizers", ()) for optimizer in optimizer_chain(wrapper)]
    unknown = [type(optimizer).__name__ for optimizer in optimizers if all(optimizer is not prepared for prepared in wrapped)]
    return PreparedByAccelerate(
        accumulation=int(getattr(accelerator, "gradient_accumulation_steps", 1)),
        wrapped=tuple(dict.fromkeys(type(optimizer).__name__ for optimizer in wrapped)),
        unknown=tuple(unknown),
    )


def ends_epoch(accelerator: Any) -> bool:
    """Return whether the data that accelerate prepared is at its last batch: it then steps whatever it has accumulated."""
    return bool(getattr(getattr(accelerator, "gradient_state", None), "end_of_dataloader", False))


def configured_reduction(model: nn.Module) -> ConfiguredReduction | None:
    """Return the dtype that the wrapper is configured to reduce gradients in, or None if nothing is configured."""
    if has_class_named(model, "DeepSpeedEngine"):
        return _configured("DeepSpeed communication_data_type", getattr(model, "communication_data_type", None))
    if handles := fsdp1_handles(model):
        reduce = {getattr(handle, "_reduce_dtype", None) for handle in handles}
        return _configured("FSDP1 reduce_dtype", reduce.pop()) if len(reduce) == 1 else None
    for module in model.modules():
        if has_class_named(module, "FSDPModule"):
            policy = getattr(module._get_fsdp_state(), "_mp_policy", None)  # type: ignore[operator] # noqa: SLF001
            dtype = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
            return _configured("FSDP2 reduce_dtype", dtype)
        if has_class_named(module, "DistributedDataParallel"):
            hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(module, "_comm_hooks", ())]
            compressing = [(name, dtype) for name in hooks for prefix, dtype in _COMPRESSING if name.startswith(prefix)]
            return _configured(f"DDP communication hook {compressing[0][0]}", compressing[0][1]) if compressing else None
    return None


def _configured(source: str, dtype: Any) -> ConfiguredReduction | None:
    return (
        ConfiguredReduction(source=source, dtype=str(dtype).removeprefix("torch.")) if isinstance(dtype, torch.dtype) else None
    )
