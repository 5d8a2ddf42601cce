"""What an optimizer's step ought to do to a weight, in float32: the yardstick that the stored weight is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping


def expected_update(
    optimizer: Any, group: Mapping[str, Any], state: Mapping[str, Tensor], weight: Tensor, gradient: Tensor
) -> Tensor | None:
    """The update of one step, float32 in the shape of `weight`: what is added to it when nothing is rounded.

    Args:
        optimizer: the optimizer that is about to step; its arithmetic is told by its class and its options.
        group: its options for this weight.
        state: its state for this weight before the step, elementwise tensors in the shape of `weight`, empty at the first step.

    Returns:
        None for an optimizer whose arithmetic is not one of these: Adam (Kingma & Ba 2015, arXiv:1412.6980), AdamW (Loshchilov
        & Hutter 2019, arXiv:1711.05101), SGD with momentum (Sutskever et al. 2013, as torch has it).
    """
    weight, gradient = weight.float(), gradient.float()
    if group.get("maximize"):
        gradient = -gradient
    if type(optimizer).__module__.startswith("optimi.") and "beta1" in group:
        return _optimi_adam(weight, gradient, group, state)
    if "betas" in group and "eps" in group and not group.get("amsgrad"):
        return _adam(weight, gradient, group, state, decoupled=is_decoupled(optimizer, group))
    if type(optimizer).__name__ == "SGD" and "momentum" in group:
        return _sgd(weight, gradient, group, state)
    return None


def is_decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether weight decay acts on the weight instead of the gradient."""
    for holder in (group, vars(optimizer)):
        for option in ("decoupled_weight_decay", "adam_w_mode", "decouple_wd"):
            if option in holder:
                return bool(holder[option])
    return "adamw" in type(optimizer).__name__.lower()


def _adam(
    weight: Tensor, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor], *, decoupled: bool
) -> Tensor | None:
    if type(gradient) is not Tensor or (state and "exp_avg_sq" not in state):
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    step = int(float(state.get("step", group.get("step", 0)))) + 1
    if not decoupled and decay:
        gradient = gradient + decay * weight
    first, second = state.get("exp_avg"), state.get("exp_avg_sq")
    mean = (1.0 - beta1) * gradient if first is None else beta1 * first.float() + (1.0 - beta1) * gradient
    square = (1.0 - beta2) * gradient.square()
    if second is not None:
        square += beta2 * second.float()
    corrected = group.get("bias_correction", True)
    scale = (1.0 - beta2**step) ** 0.5 if corrected else 1.0
    rate = lr / (1.0 - beta1**step) if corrected else lr
    update = -rate * mean / (square.sqrt() / scale + float(group["eps"]))
    if decoupled and decay:
        update -= lr * decay * weight
    return update


def _optimi_adam(weight: Tensor, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    """The Adam of optimi keeps moments corrected for their bias already: each beta is (beta^t - beta) / (beta^t - 1)."""
    step = int(float(group.get("step", 0))) + 1
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if decay and not group["decouple_wd"]:
        gradient = gradient + decay * weight
    moments = []
    for name, option, value in (("exp_avg", "beta1", gradient), ("exp_avg_sq", "beta2", gradient.square())):
        beta = float(group[option])
        corrected = (beta**step - beta) / (beta**step - 1.0)
        before = state.get(name)
        moments.append((1.0 - corrected) * value + (0.0 if before is None else corrected * before.float()))
    update = -lr * moments[0] / (moments[1].sqrt() + float(group["eps"]))
    return update - lr * decay * weight if decay and group["decouple_wd"] else update


def betas_of(group: Mapping[str, Any]) -> tuple[float, float] | None:
    """Adam's betas, under either of the names that optimizers keep them by."""
    if "betas" in group:
        return float(group["betas"][0]), float(group["betas"][1])
    if "beta1" in group and "beta2" in group:
        return float(group["beta1"]), float(group["beta2"])
    return None


def value_of(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """What a stored weight stands for: with Kahan summation, itself and what its rounding has put aside for later."""
    aside = state.get("kahan_comp", state.get("compensation"))
    return weight if aside is None or aside.shape != weight.shape else weight.float() + aside.float()


def _sgd(weight: Tensor, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    if decay := float(group.get("weight_decay", 0.0)):
        gradient = gradient + decay * weight
    momentum = float(group["momentum"])
    if momentum:
        before = state.get("momentum_buffer")
        buffer = gradient if before is None else momentum * before.float() + (1.0 - float(group["dampening"])) * gradient
        gradient = gradient + momentum * buffer if group.get("nesterov") else buffer
    return -float(group["lr"]) * gradient


def sample(tensor: Tensor, most: int) -> Tensor:
    """A copy of at most `most` elements of a tensor, evenly spread over it: flat, on its device."""
    flat = tensor.detach().reshape(-1)
    stride = -(-flat.numel() // most) if flat.numel() > most else 1
    return flat[::stride].clone()


def differing_share(first: Tensor, second: Tensor) -> float:
    """The share of elements that differ; of NaNs, those that only one of them has."""
    same = (first == second) | (torch.isnan(first) & torch.isnan(second))
    return 1.0 - same.double().mean().item() if first.numel() else 0.0
