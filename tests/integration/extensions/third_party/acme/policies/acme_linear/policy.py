"""A policy of two layers, built from a shared layer of benchbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from benchbox.registry.contracts import BatchSpec, Losses, Role

from .._layers.nn.precision import Linear

if TYPE_CHECKING:
    from benchbox.registry.contracts import Axes, Batch

STATE = ACTION = 8


class AcmeLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = Linear(STATE, width)
        self.action_out = Linear(width, ACTION)

    def forward(self, batch: Batch, *, per_sample: bool = False) -> Losses:
        target: Tensor = batch["action"].mean(dim=1)  # (B, ACTION)
        error = self.action_out(self.layer(batch["state"])).float() - target
        loss = error.square().mean()
        return Losses(loss, {"square": loss.detach()})

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return (Linear,)

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(
            cameras=1, image_size=(8, 8), state_dim=STATE, action_dim=ACTION, horizon=2, prompt_tokens=4, text_vocab=64
        )

    def parameter_roles(self) -> dict[str, Role]:
        return {name: Role("head", decay=parameter.ndim > 1) for name, parameter in self.named_parameters()}

    def load_statistics(self, statistics: Any) -> None:
        """Do nothing: actions are not normalised."""


def build(preset: dict[str, Any], axes: Axes) -> AcmeLinear:
    return AcmeLinear(preset["width"])
