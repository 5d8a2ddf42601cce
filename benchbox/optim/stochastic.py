"""AdamW over bfloat16 parameters with stochastic rounding, from torchao (the optional extra `lowbit`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torchao.optim import _AdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class StochasticAdamW(_AdamW):
    """AdamW that steps 16-bit parameters directly, with stochastic rounding.

    It computes in float32, then rounds each new weight up or down at random, with probabilities that make the mean exact. An
    update below half a unit in the last place thus takes effect occasionally instead of never. Moments have the dtype of the
    parameters and are rounded to nearest, so a beta2 near 1 stalls them as in any bfloat16 Adam.

    torchao rounds with the process's random generator. Here every step seeds that generator with the number of the step and
    restores it afterwards: all ranks round their copy of a parameter alike, so replicas remain equal; other users of the
    generator are not affected; and a resumed run rounds as the uninterrupted run would have.

    Args:
        params: parameters, or groups of them. Learning rates become tensors, as torchao requires; torch's schedules fill them.
        arguments: lr, betas, eps, weight_decay.
    """

    def __init__(self, params: Iterable[Any], **arguments: Any) -> None:
        super().__init__(params, **arguments, bf16_stochastic_round=True)
        self.param_groups[0]["steps_taken"] = 0  # in a group, so that it is part of the state dict

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state_group = self.param_groups[0]
        device = state_group["params"][0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _compile_stance(device):
            torch.manual_seed(state_group["steps_taken"])
            super().step()
        state_group["steps_taken"] += 1
        return loss


def _compile_stance(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which torchao's step is not compiled on a CPU.

    torchao compiles its step for every shape of parameter. On a CPU that needs a C++ compiler and about three seconds per shape
    (measured), so the same operations run eagerly there.
    """
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else nullcontext()
