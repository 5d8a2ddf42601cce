"""Exponential moving averages of the stepped weights, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class WeightAverages:
    """Float32 averages of the tensors that the optimizer steps: a_n = d_n a_{n-1} + (1 - d_n) w_n, with a_0 = w_0.

    They are sharded like those tensors, because each is the average of what this rank steps. The decay d_n is constant, or with
    `warmup` min(decay, (1 + n) / (10 + n)) at the n-th update, as in TensorFlow's ExponentialMovingAverage with `num_updates`.

    Args:
        stepped: tensors of this rank by name, from `Backend.stepped_tensors`.
    """

    def __init__(self, stepped: Mapping[str, Tensor], decay: float, *, warmup: bool) -> None:
        self.tensors = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in stepped.items()}
        self.updates = 0
        self._decay = decay
        self._warmup = warmup

    @property
    def next_decay(self) -> float:
        """The decay of the next update."""
        count = self.updates + 1
        return min(self._decay, (1 + count) / (10 + count)) if self._warmup else self._decay

    @torch.no_grad()
    def update(self, stepped: Mapping[str, Tensor]) -> None:
        """Move the averages towards the tensors, which have the names and shapes of those at construction."""
        weight = 1.0 - self.next_decay
        averages, values = list(self.tensors.values()), [stepped[name] for name in self.tensors]
        if all(value.dtype == torch.float32 for value in values):
            torch._foreach_lerp_(averages, values, weight)
        else:
            for average, value in zip(averages, values, strict=True):
                average.lerp_(value.float(), weight)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the averages of this rank, not copied, and the number of updates."""
        return {"averages": dict(self.tensors), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the averages of `state_dict`, which must be of the same sharding.

        Raises:
            ValueError: they are of other tensors.
        """
        saved = state["averages"]
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}:
            raise ValueError("the saved averages are of other tensors, or sharded differently")
        for name, tensor in self.tensors.items():
            tensor.copy_(saved[name])
        self.updates = int(state["updates"])
