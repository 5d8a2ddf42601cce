"""Construction of an `Accelerator` for each backend, on GPUs and on CPUs.

Mixed precision is always named: without, accelerate reads `ACCELERATE_MIXED_PRECISION` and runs forward under autocast.

On CUDA accelerate does everything by itself. On CPU, `Accelerator(cpu=True, fsdp_plugin=...)` silently drops the plugin and
runs DDP, so the state is set by hand after construction, here and nowhere else; `observe` checks the result.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
)
from torch.distributed import distributed_c10d

from benchbox.registry.launch_environment import ACCELERATE_PREFIXES


def single_accelerator() -> Accelerator:
    """Return an accelerator of one process.

    The variables of a launcher would make accelerate wrap even one process in DDP, so they are removed.
    """
    of_launcher = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    of_accelerate = [name for name in os.environ if name.startswith(ACCELERATE_PREFIXES)]
    for variable in (*of_launcher, *of_accelerate):
        os.environ.pop(variable, None)
    return Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")


def ddp_accelerator() -> Accelerator:
    """Return an accelerator for ranks under a launcher.

    Gradients are views into DDP's buckets: as tensors of their own they would take their memory twice.
    """
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    return Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no", kwargs_handlers=handlers)


def fsdp_accelerator(
    plugin: FullyShardedDataParallelPlugin, parallelism: ParallelismConfig | None = None, *, upcasts: bool = False
) -> Accelerator:
    """Return an accelerator for FSDP1 or FSDP2; `parallelism` gives a hybrid mesh.

    With `upcasts` accelerate is configured for mixed precision, and then stores bfloat16 parameters in float32 when it prepares
    them. Its autocast stays off: the plugin's policy sets the compute dtype.
    """
    precision: dict[str, Any] = {"mixed_precision": "no"}
    if upcasts:
        precision = {"mixed_precision": "bf16", "kwargs_handlers": [AutocastKwargs(enabled=False)]}
    if torch.cuda.is_available():
        return Accelerator(fsdp_plugin=plugin, parallelism_config=parallelism, **precision)
    accelerator = Accelerator(cpu=True, **precision)
    state = accelerator.state
    # Both states are changed, because accelerate copies one over the other now and then. Their device, cpu:0, is one that FSDP
    # refuses.
    changes = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    for shared in (state.__dict__, PartialState._shared_state):  # noqa: SLF001
        shared.update(changes)
    state.fsdp_plugin = plugin
    if parallelism is not None:
        state.parallelism_config = parallelism
        state.device_mesh = parallelism.build_device_mesh("cpu")
    return accelerator


def deepspeed_accelerator(plugin: Any, accumulation: int) -> Accelerator:
    """Return an accelerator for ZeRO.

    `cpu=True` would drop the plugin; on CPU the environment variables of the backend do what is needed instead. DeepSpeed has a
    default timeout of its own, so it is given that of torch.
    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    handler = InitProcessGroupKwargs(backend=backend, timeout=distributed_c10d.default_pg_timeout)
    mixed_precision = "bf16" if plugin.deepspeed_config["bf16"]["enabled"] else "no"
    return Accelerator(
        mixed_precision=mixed_precision,
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[handler],
    )


def runs(accelerator: Accelerator, distributed_type: DistributedType) -> bool:
    """Return whether accelerate took the plugin. It may drop one without a word and run DDP, which `observe` reports."""
    return accelerator.distributed_type == distributed_type  # type: ignore[no-any-return]


def device_of(accelerator: Accelerator) -> torch.device:
    """Return the device of this rank: `cuda:<local rank>` or plain `cpu`."""
    device: torch.device = accelerator.device
    if device.type == "cpu":
        return torch.device("cpu")
    # A single process has a device without an index, which is equal to that of no tensor.
    return torch.device(device.type, torch.cuda.current_device()) if device.index is None else device
