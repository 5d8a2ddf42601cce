"""A policy of a few parameters that fails on purpose; its preset defines how, on which rank and in which step."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchbox.registry.contracts import BatchSpec, Losses, Role

if TYPE_CHECKING:
    from benchbox.registry.contracts import Axes, Batch

STATE = ACTION = 8
ALLOWANCE_BYTES = 2**28  # of address space that a rank gets before it runs out of memory


class Layer(nn.Linear):
    """The only sharding unit."""


class Faulty(nn.Module):
    def __init__(self, fault: str | None, rank: int, step: int) -> None:
        super().__init__()
        self.layer = Layer(STATE, ACTION)
        self._fault = fault if rank == int(os.environ["RANK"]) else None
        self._step = step
        self._steps = 0

    def forward(self, batch: Batch, *, per_sample: bool = False) -> Losses:
        self._steps += 1
        if self._fault == "slow":
            time.sleep(2)
        if self._steps == self._step:
            self._fail()
        state: Tensor = batch["state"]  # (B, STATE)
        target: Tensor = batch["action"].mean(dim=1)  # (B, ACTION)
        loss = (self.layer(state.to(self.layer.weight.dtype)) - target).float().square().mean()
        if self._fault == "nan" and self._steps == self._step:
            loss = loss * (loss - loss - 1).sqrt()
        if self._fault == "branch" and self._steps == self._step:
            dist.all_gather_into_tensor(state.new_empty(2 * state.numel()), state.flatten())
        return Losses(loss, {"square": loss.detach()})

    def _fail(self) -> None:
        if self._fault == "raise":
            raise RuntimeError("this policy raises in its second step")
        if self._fault == "oom":
            exhaust_memory()
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "segfault":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._fault == "exit":
            os._exit(3)
        if self._fault == "sleep":
            time.sleep(3600)
        while self._fault == "wait" and Path("gate").exists():
            time.sleep(0.05)

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return (Layer,)

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(
            cameras=1, image_size=(8, 8), state_dim=STATE, action_dim=ACTION, horizon=2, prompt_tokens=4, text_vocab=64
        )

    def parameter_roles(self) -> dict[str, Role]:
        return {name: Role("head", decay=parameter.ndim > 1) for name, parameter in self.named_parameters()}

    def load_statistics(self, statistics: Any) -> None:
        """Ignore the statistics: nothing is normalised."""


def exhaust_memory() -> None:
    """Allocate tensors until the system has no more memory for this process."""
    limit = psutil.Process().memory_info().vms + ALLOWANCE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    activations = []
    while True:
        activations.append(torch.ones(ALLOWANCE_BYTES // 16))


def build(preset: dict[str, Any], axes: Axes) -> Faulty:
    return Faulty(preset.get("fault"), preset.get("rank", 0), preset.get("step", 0))
