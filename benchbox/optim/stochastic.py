"""AdamW over bfloat16 parameters with stochastic rounding, from torchao (the optional extra `lowbit`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torchao.optim import _AdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class StochasticAdamW(_AdamW):
    """Steps 16-bit parameters themselves: computes in float32, then rounds each new weight up or down at random, with
    probabilities that make the mean exact. An update below half a unit in the last place thus arrives now and then instead of
    never. Moments have the parameters' dtype and are rounded to nearest, so beta2 near 1 stalls them as in any bfloat16 Adam.

    torchao rounds by the process's random generator. Here each step has random numbers of its own, seeded by its number: every
    rank rounds its copy of a parameter alike, so that replicas stay equal; nothing else that draws is disturbed; and a resumed
    run rounds as the interrupted one would have.

    Args:
        params: parameters, or groups of them. Their rates become tensors, as torchao wants them; torch's schedules fill those.
        arguments: lr, betas, eps, weight_decay.
    """

    def __init__(self, params: Iterable[Any], **arguments: Any) -> None:
        super().__init__(params, **arguments, bf16_stochastic_round=True)
        self.param_groups[0]["steps_taken"] = 0  # in a group, so that it is saved with the rest

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step, of the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = self.param_groups[0]
        device = first["params"][0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _compiled_for(device):
            torch.manual_seed(first["steps_taken"])
            super().step()
        first["steps_taken"] += 1
        return loss


def _compiled_for(device: torch.device) -> AbstractContextManager[Any]:
    """Around a step of torchao, which compiles it for every shape of parameter. On a CPU that takes a C++ compiler and some
    three seconds a shape (measured), so there the same operations run one by one.
    """
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else nullcontext()
