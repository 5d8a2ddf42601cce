"""A policy of three layers, one of whose ranks may be slower than the other on purpose; its preset says how."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

from benchbox.registry.contracts import BatchSpec, Losses, Role

if TYPE_CHECKING:
    from benchbox.registry.contracts import Axes, Batch

STATE = ACTION = 8
WORK = 10  # matrix products of every forward pass


class Layer(nn.Linear):
    """The only sharding unit."""


class Straggling(nn.Module):
    def __init__(self, sleep_s: float, work: int, pinned: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(STATE, 16), Layer(16, 16), Layer(16, ACTION)])
        self._sleep_s, self._work = sleep_s, work
        if pinned:
            psutil.Process().cpu_affinity([int(os.environ["RANK"])])
            os.nice(5 * int(os.environ["RANK"]))

    def forward(self, batch: Batch, *, per_sample: bool = False) -> Losses:
        if self._sleep_s and os.environ["RANK"] == "1":
            time.sleep(self._sleep_s)
        with torch.no_grad():
            product = torch.ones(256, 256)
            for _ in range(self._work):
                product = product @ product / 256
        state: Tensor = batch["state"][:, -1]  # (B, STATE)
        target: Tensor = batch["action"].mean(dim=1)  # (B, ACTION)
        predicted = state
        for layer in self.layers:
            predicted = layer(predicted)
        loss = (predicted - target).square().mean()
        return Losses(loss, {"square": loss.detach()})

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


def build(preset: dict[str, Any], axes: Axes) -> Straggling:
    return Straggling(preset.get("sleep_s", 0.0), preset.get("work", WORK), preset.get("pinned", False))
