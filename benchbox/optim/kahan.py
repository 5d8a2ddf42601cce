"""AdamW over bfloat16 parameters with Kahan summation, from optimi (the optional extra `lowbit`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optimi
from optimi.utils import HAS_TRITON
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor


class KahanAdamW(optimi.AdamW):
    """AdamW that steps 16-bit parameters directly, and keeps what rounding lost of each weight for its next step.

    Its arithmetic is optimi's. Three things differ from how optimi treats groups: each has its own `betas`, as in torch, where
    optimi takes one pair for all; a group of which no parameter is trained is not stepped, where optimi counts a step and later
    corrects the moments for steps that they never saw; and the kernel of a group is chosen by its parameters, where optimi
    chooses by the gradients of its first step, of which a frozen group has none.

    Args:
        groups: parameter groups, with `betas` where they differ from those of `arguments`.
        arguments: lr, betas, eps, weight_decay.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, groups: Iterable[Mapping[str, Any]], **arguments: Any) -> None:
        super().__init__([_with_betas_of_optimi(group) for group in groups], **arguments, kahan_sum=True)
        for group in self.param_groups:
            group["triton"] = HAS_TRITON and all(type(p) is nn.Parameter and p.is_cuda for p in group["params"])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step the groups that have a parameter which is trained."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if any(map(_is_trained, group["params"]))]
        try:
            loss: float | None = super().step(closure)
        finally:
            self.param_groups = groups
        return loss


def _is_trained(parameter: Tensor) -> bool:
    """Return whether this step trains a parameter. One without elements on this rank has no gradient then either."""
    return parameter.requires_grad and (parameter.grad is not None or not parameter.numel())


def _with_betas_of_optimi(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with its betas under the names that optimi reads."""
    renamed = dict(group)
    if (betas := renamed.pop("betas", None)) is not None:
        renamed["beta1"], renamed["beta2"] = betas
    return renamed
