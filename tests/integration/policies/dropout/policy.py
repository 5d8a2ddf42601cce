"""A policy of two layers with dropout from the generator of the process: not everything random in a step is in its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from benchbox.registry.contracts import BatchSpec, Losses, Role

if TYPE_CHECKING:
    from benchbox.registry.contracts import Axes, Batch

STATE = ACTION = 8


class Layer(nn.Linear):
    """The only sharding unit."""


class Dropping(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.second = Layer(STATE, 64), Layer(64, ACTION)
        self.dropout = nn.Dropout(rate)

    def forward(self, batch: Batch, *, per_sample: bool = False) -> Losses:
        state: Tensor = batch["state"][:, -1]  # (B, STATE)
        target: Tensor = batch["action"].mean(dim=1)  # (B, ACTION)
        hidden = self.dropout(self.first(state.to(self.first.weight.dtype)).tanh())
        loss = (self.second(hidden) - target).float().square().mean()
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


def build(preset: dict[str, Any], axes: Axes) -> Dropping:
    return Dropping(preset["rate"])
