"""Direct calls of torch's fused Adam kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as hooks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def is_plain_adam(inner: Optimizer) -> bool:
    """Return whether a step of `inner` is Adam's or AdamW's arithmetic and nothing else.

    An optimizer with step hooks runs its own `step`, with the scaled gradients in the `.grad` of its masters, because the hooks
    may read them.
    """
    return type(inner) in (torch.optim.Adam, torch.optim.AdamW) and "step" not in vars(inner) and not _has_step_hooks(inner)


def can_step_fused(inner: Optimizer) -> bool:
    """Return whether `fused_step` does everything that `inner.step()` would do with the current first group.

    It does not create the initial state; torch's own step does.
    """
    if not is_plain_adam(inner):
        return False
    group = inner.param_groups[0]
    return bool(group["fused"] and all(inner.state.get(master) for master in group["params"]))


def _has_step_hooks(inner: Any) -> bool:
    # Torch has no public way to ask. The names are those of torch 2.0 to 2.13.
    return bool(
        hooks._global_optimizer_pre_hooks  # noqa: SLF001
        or hooks._global_optimizer_post_hooks  # noqa: SLF001
        or inner._optimizer_step_pre_hooks  # noqa: SLF001
        or inner._optimizer_step_post_hooks  # noqa: SLF001
    )


def fused_step(inner: Optimizer, divisor: Tensor | None) -> None:
    """Step the first group of `inner` with one kernel, which also divides the gradients by `divisor`.

    The division gives the same bits as `div_`. A separate division, and the code of `Optimizer.step` around the kernel, would
    cost a tenth of the step on a CPU.
    """
    group = inner.param_groups[0]
    masters = group["params"]
    states = [inner.state[master] for master in masters]

    def state_tensors(name: str) -> list[Tensor]:
        return [state[name] for state in states]

    torch._foreach_add_(state_tensors("step"), 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        masters,
        [master.grad for master in masters],
        state_tensors("exp_avg"),
        state_tensors("exp_avg_sq"),
        state_tensors("max_exp_avg_sq") if group["amsgrad"] else [],
        state_tensors("step"),
        lr=group["lr"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        grad_scale=divisor,
    )
