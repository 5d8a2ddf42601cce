"""A linear layer whose forward pass waits for a timer, as for a GPU: other load hardly changes the times of its steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from benchbox.registry.contracts import BatchSpec, Losses, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.registry.contracts import Axes, Batch

STATE = ACTION = 8


class Waiting(nn.Module):
    """One layer from the state to the mean action; every forward pass waits for `wait_s` seconds."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(STATE, ACTION)])
        self.wait_s = wait_s

    def forward(self, batch: Batch, **_options: Any) -> Losses:
        """Return the mean squared error of the mean action."""
        time.sleep(self.wait_s)
        state: Tensor = batch["state"][:, -1]  # (B, STATE)
        loss = (self.layers[0](state) - batch["action"].mean(dim=1)).square().mean()
        return Losses(loss, {"square": loss.detach()})

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return (nn.Linear,)

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(
            cameras=1, image_size=(8, 8), state_dim=STATE, action_dim=ACTION, horizon=2, prompt_tokens=4, text_vocab=64
        )

    def parameter_roles(self) -> dict[str, Role]:
        return {name: Role("head", decay=parameter.ndim > 1) for name, parameter in self.named_parameters()}

    def load_statistics(self, statistics: Any) -> None:
        """Ignore the statistics: nothing is normalised."""


def build(preset: Mapping[str, Any], _axes: Axes) -> Waiting:
    """Build the policy in float32 on torch's default device."""
    return Waiting(preset["wait_s"])
