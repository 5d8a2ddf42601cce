"""One bucket of Adam in one call of torch's fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as hooks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def is_plain(inner: Optimizer) -> bool:
    """Whether a step of `inner` is Adam's arithmetic and nothing else.

    An optimizer that anyone watches by hooks steps by itself, with the scaled gradients in the `.grad` of masters: that is what
    they came to see.
    """
    return type(inner) in (torch.optim.Adam, torch.optim.AdamW) and "step" not in vars(inner) and not _watched(inner)


def steps_fused(inner: Optimizer) -> bool:
    """Whether `fused_step` does all that `inner.step()` does with the group it holds now.

    It does not make the first state: torch does, in its own way.
    """
    if not is_plain(inner):
        return False
    group = inner.param_groups[0]
    return bool(group["fused"] and all(inner.state.get(master) for master in group["params"]))


def _watched(inner: Any) -> bool:
    # Torch has no public way to ask. The names are those of 2.0 to 2.13.
    return bool(
        hooks._global_optimizer_pre_hooks  # noqa: SLF001
        or hooks._global_optimizer_post_hooks  # noqa: SLF001
        or inner._optimizer_step_pre_hooks  # noqa: SLF001
        or inner._optimizer_step_post_hooks  # noqa: SLF001
    )


def fused_step(inner: Optimizer, divisor: Tensor | None) -> None:
    """Step the group that `inner` holds. The kernel divides gradients by `divisor` in passing, bit for bit as `div_` does;
    that, and what `Optimizer.step` does around the kernel, would otherwise cost a tenth of the step on a CPU.
    """
    group = inner.param_groups[0]
    masters = group["params"]
    states = [inner.state[master] for master in masters]

    def each(name: str) -> list[Tensor]:
        return [state[name] for state in states]

    torch._foreach_add_(each("step"), 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        masters,
        [master.grad for master in masters],
        each("exp_avg"),
        each("exp_avg_sq"),
        each("max_exp_avg_sq") if group["amsgrad"] else [],
        each("step"),
        lr=group["lr"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        grad_scale=divisor,
    )
