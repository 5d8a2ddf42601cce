"""Who shards and reduces, read from live objects.

This module does not know which backend was asked for. A set-up that silently became another one (accelerate ignores its
plugins under `cpu=True` and runs DDP; FSDP1's hybrid strategy fell back to NO_SHARD) is therefore seen as what it became.
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
    """Ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def optimizer_chain(optimizer: Any) -> list[Any]:
    """The optimizer and everything it wraps, outermost first, following `.optimizer` and `.inner`."""
    chain: list[Any] = []
    while optimizer is not None and all(optimizer is not link for link in chain):
        chain.append(optimizer)
        optimizer = getattr(optimizer, "optimizer", None) or getattr(optimizer, "inner", None)
    return chain


def zero_optimizer(chain: list[Any]) -> Any:
    """DeepSpeed's ZeRO optimizer in the chain, or None."""
    return next((link for link in chain if type(link).__name__.startswith("DeepSpeedZeroOptimizer")), None)


def identify_backend(model: nn.Module, chain: list[Any]) -> tuple[str, str | None]:
    """(backend, sharding) of a wrapped model and the optimizers around the one that steps it."""
    zero = zero_optimizer(chain)
    if zero is not None:
        return _identify_zero(zero)
    if any(has_class_named(link, "BF16_Optimizer") for link in chain):  # ZeRO-1 whose gradients accumulate in float32
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
    """The handles that hold FSDP1's flat parameters, and with them the strategy and dtypes in force."""
    handles = [getattr(unit, "_handle", None) for unit in fsdp1_units(model)]
    return [handle for handle in handles if handle is not None]


def _identify_zero(zero: Any) -> tuple[str, str]:
    if type(zero).__name__.endswith("Stage3"):
        return "zero3", f"parameters, gradients and optimizer state partitioned over {world_size()} ranks"
    if zero.partition_gradients:
        return "zero2", f"gradients and optimizer state partitioned over {world_size()} ranks"
    return "zero1", f"optimizer state partitioned over {world_size()} ranks"


def _identify_fsdp1(model: nn.Module) -> tuple[str, str]:
    # The handle holds the strategy in force; the wrapper's argument is only what was asked for.
    strategies = {handle._sharding_strategy.name for handle in fsdp1_handles(model)}  # noqa: SLF001
    found = sorted(_FSDP1_NAMES[strategy] for strategy in strategies)
    sharding = f"{', '.join(sorted(strategies))} in {len(fsdp1_units(model))} units"
    return (found[0] if len(found) == 1 else "fsdp1, mixed: " + ", ".join(found)), sharding


def _identify_fsdp2(model: nn.Module) -> tuple[str, str]:
    parameters: list[Any] = list(model.parameters())
    layouts = {
        (tuple(str(placement) for placement in parameter.placements), tuple(parameter.device_mesh.shape))
        if has_class_named(parameter, "DTensor")
        else (("plain",), ())
        for parameter in parameters
    }
    units = sum(has_class_named(module, "FSDPModule") for module in model.modules())
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


def setup_of(model: nn.Module, chain: list[Any], accelerator: Any = None) -> Setup:
    """Who shards and reduces, and what accelerate was told about it, if it is there."""
    backend, sharding = identify_backend(model, chain)
    told = {} if accelerator is None else _told(accelerator)
    return Setup(backend=backend, model_class=type(model).__name__, sharding=sharding, **told)


def _told(accelerator: Any) -> dict[str, str | None]:
    state = getattr(accelerator, "state", None)
    told: dict[str, str | None] = {"mixed_precision": getattr(accelerator, "mixed_precision", None), "source": "accelerate"}
    # accelerate sets these itself when it is given a plugin, before it decides whether to use it.
    for variable, family in (("ACCELERATE_USE_FSDP", "fsdp"), ("ACCELERATE_USE_DEEPSPEED", "zero")):
        if os.environ.get(variable, "false").lower() in {"true", "1"}:
            return told | {"requested": family, "source": variable}
    for plugin, family in (("fsdp_plugin", "fsdp"), ("deepspeed_plugin", "zero")):
        if getattr(state, plugin, None) is not None:
            return told | {"requested": family, "source": f"accelerate's {plugin}"}
    return told


def prepared_by(accelerator: Any, stepping: list[Any]) -> PreparedByAccelerate:
    """What accelerate wrapped, of the optimizers that step."""
    wrapped = [optimizer for held in getattr(accelerator, "_optimizers", ()) for optimizer in optimizer_chain(held)]
    unknown = [type(each).__name__ for each in stepping if all(each is not known for known in wrapped)]
    return PreparedByAccelerate(
        accumulation=int(getattr(accelerator, "gradient_accumulation_steps", 1)),
        wrapped=tuple(dict.fromkeys(type(each).__name__ for each in wrapped)),
        unknown=tuple(unknown),
    )


def configured_reduction(model: nn.Module) -> ConfiguredReduction | None:
    """The dtype that gradients are said to be reduced in, by the wrapper's own policy; None where nothing says it."""
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
            told = [(name, dtype) for name in hooks for mark, dtype in _COMPRESSING if name.startswith(mark)]
            return _configured(f"DDP communication hook {told[0][0]}", told[0][1]) if told else None
    return None


def _configured(source: str, dtype: Any) -> ConfiguredReduction | None:
    return ConfiguredReduction(source=source, dtype=str(dtype).removeprefix("torch.")) if isinstance(dtype, torch.dtype) else None
