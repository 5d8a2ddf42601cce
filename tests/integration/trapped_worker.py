"""The worker with one fault: `cpu=True` makes accelerate drop a sharding plugin silently and run DDP. All else is unchanged."""

from __future__ import annotations

import sys
from typing import Any

from accelerate import Accelerator

from benchbox.backends import accelerators, deepspeed, fsdp1, fsdp2
from benchbox.worker.rank import run_rank


def fsdp_in_the_trap(plugin: Any, parallelism: Any = None, *, upcasts: bool = False) -> Accelerator:
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def deepspeed_in_the_trap(plugin: Any, accumulation: int) -> Accelerator:
    return Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation)


if __name__ == "__main__":
    fsdp1.fsdp_accelerator = fsdp_in_the_trap
    fsdp2.fsdp_accelerator = fsdp_in_the_trap
    accelerators.deepspeed_accelerator = deepspeed_in_the_trap
    deepspeed._Zero.environment = staticmethod(dict)
    run_rank(sys.argv[1])
