"""AdamW over bfloat16 parameters with Kahan summation, from optimi (the optional extra `lowbit`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optimi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


class KahanAdamW(optimi.AdamW):
    """Steps 16-bit parameters themselves and keeps what rounding took from each in a second 16-bit tensor, `kahan_comp`, which
    goes into the next step. Moments have the parameters' dtype, so beta2 near 1 stalls them as in any bfloat16 Adam.

    optimi multiplies weights by 1 - lr * weight_decay outside that sum, which leaves a bfloat16 weight as it is unless
    lr * weight_decay is above 2^-9. Here decay goes into the sum, like every other update.

    Args:
        params: parameters, or groups of them. The groups hold the betas as `beta1` and `beta2`.
        arguments: lr, betas, eps, weight_decay.
    """

    def __init__(self, params: Iterable[Any], **arguments: Any) -> None:
        super().__init__(params, **arguments, kahan_sum=True)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step, of the parameters that have a gradient. The gradients are overwritten."""
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            loss: float | None = super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    def _init_group(self, group: dict[str, Any], params: list[Tensor], *lists: list[Tensor]) -> None:
        """Collects what the step of one group works on; `lists` are its gradients, moments and, last, compensations."""
        super()._init_group(group, params, *lists)
        for parameter, kept in zip(params, lists[-1], strict=True):
            kept.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
        group["weight_decay"] = 0.0  # until the end of this step: it is in the sum
