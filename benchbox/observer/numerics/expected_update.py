"""Expected updates: an optimizer's arithmetic in float32, the reference that stored weights are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..introspect.tensors import has_class_named, is_of_package

if TYPE_CHECKING:
    from collections.abc import Mapping

# Optimizers of torch, DeepSpeed, apex, bitsandbytes, timm and others whose groups have betas and eps as Adam's have.
_OTHER_ARITHMETIC = (
    *("Adamax", "NAdam", "NAdamW", "NAdamLegacy", "RAdam", "RAdamLegacy", "AdamP", "AdaBelief", "Adan", "AdEMAMix"),
    *("StableAdamW", "Lamb", "LAMB", "FusedLamb", "FusedMixedPrecisionLamb", "NovoGrad", "NvNovoGrad", "FusedNovoGrad"),
    *("LaProp", "Adopt", "ADOPT", "OnebitAdam", "OnebitLamb", "ZeroOneAdam", "Mars", "MARS", "Prodigy", "QHAdam", "DAdaptAdam"),
    *("GaLoreAdamW", "Adam_mini", "AdamWScheduleFree", "RAdamScheduleFree", "Ranger"),
)


def expected_update(
    optimizer: Any, group: Mapping[str, Any], state: Mapping[str, Tensor], weight: Tensor, gradient: Tensor
) -> Tensor | None:
    """Return the update of one step without rounding: float32 in the shape of `weight`, to be added to it.

    Args:
        optimizer: the optimizer that is about to step. Its class and options determine its arithmetic.
        group: the parameter group of this weight.
        state: the optimizer's state for this weight before the step: elementwise tensors in the shape of `weight`, empty at
            the first step.
        weight: the weight before the step.
        gradient: the gradient of the weight, in its shape.

    Returns:
        The update, or None if the optimizer's arithmetic is not one of these: Adam (Kingma & Ba 2015, arXiv:1412.6980), AdamW
        (Loshchilov & Hutter 2019, arXiv:1711.05101), SGD with momentum (Sutskever et al. 2013, as in torch).
    """
    weight, gradient = weight.float(), gradient.float()
    if group.get("maximize"):
        gradient = -gradient
    if is_of_package(optimizer, "optimi"):  # RAdam, Lion, ... have options of Adam, and other arithmetic
        return _optimi_adam(weight, gradient, group, state) if has_class_named(optimizer, "Adam") else None
    if has_class_named(optimizer, *_OTHER_ARITHMETIC):
        return None
    if "betas" in group and "eps" in group and not group.get("amsgrad"):
        return _adam(weight, gradient, group, state, decoupled=has_decoupled_decay(optimizer, group))
    if type(optimizer).__name__ == "SGD" and "momentum" in group:
        return _sgd(weight, gradient, group, state)
    return None


def has_decoupled_decay(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return whether weight decay acts on the weight instead of the gradient."""
    for options in (group, vars(optimizer)):
        for name in ("decoupled_weight_decay", "adam_w_mode", "decouple_wd"):
            if name in options:
                return bool(options[name])
    return "adamw" in type(optimizer).__name__.lower()


def is_fused(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return whether one kernel computes the whole update in float32, and rounds once: of torch, DeepSpeed or apex."""
    return bool(group.get("fused")) or has_class_named(optimizer, "FusedAdam", "DeepSpeedCPUAdam")


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
    exp_avg, exp_avg_sq = state.get("exp_avg"), state.get("exp_avg_sq")
    m = (1.0 - beta1) * gradient if exp_avg is None else torch.lerp(exp_avg.float(), gradient, 1.0 - beta1)
    v = (1.0 - beta2) * gradient.square()
    if exp_avg_sq is not None:
        v.add_(exp_avg_sq.float(), alpha=beta2)
    has_correction = group.get("bias_correction", True)
    scale = (1.0 - beta2**step) ** 0.5 if has_correction else 1.0
    step_size = lr / (1.0 - beta1**step) if has_correction else lr
    update = m.mul_(-step_size).div_(v.sqrt_().div_(scale).add_(float(group["eps"])))
    if decoupled and decay:
        update.sub_(weight, alpha=lr * decay)
    return update


def _optimi_adam(weight: Tensor, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    """Return the update of optimi's Adam, whose moments are corrected for bias: its beta is (beta^t - beta) / (beta^t - 1)."""
    step = int(float(group.get("step", 0))) + 1
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if decay and not group["decouple_wd"]:
        gradient = gradient + decay * weight
    moments = []
    for name, option, value in (("exp_avg", "beta1", gradient), ("exp_avg_sq", "beta2", gradient.square())):
        beta = float(group[option])
        corrected_beta = (beta**step - beta) / (beta**step - 1.0)
        before = state.get(name)
        moments.append((1.0 - corrected_beta) * value + (0.0 if before is None else corrected_beta * before.float()))
    update = -lr * moments[0] / (moments[1].sqrt() + float(group["eps"]))
    return update - lr * decay * weight if decay and group["decouple_wd"] else update


def adam_betas(group: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return Adam's betas from a parameter group, `betas` or `beta1` and `beta2`, or None."""
    betas = group.get("betas", (group.get("beta1"), group.get("beta2")))
    numbers = [float_or_none(beta) for beta in betas[:2]] if isinstance(betas, (tuple, list)) else []
    return (numbers[0], numbers[1]) if len(numbers) == 2 and None not in numbers else None  # type: ignore[return-value]


def float_or_none(value: Any) -> float | None:
    """Return a number as a float, and None for anything else: Adafactor's eps is a pair."""
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None


def compensated_weight(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the value that a stored weight stands for: with Kahan summation, the sum of the weight and its compensation."""
    compensation = state.get("kahan_comp", state.get("compensation"))
    return weight if compensation is None or compensation.shape != weight.shape else weight.float() + compensation.float()


def _sgd(weight: Tensor, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    if decay := float(group.get("weight_decay", 0.0)):
        gradient = gradient + decay * weight
    momentum = float(group["momentum"])
    if momentum:
        before = state.get("momentum_buffer")
        buffer = gradient if before is None else momentum * before.float() + (1.0 - float(group["dampening"])) * gradient
        gradient = gradient + momentum * buffer if group.get("nesterov") else buffer
    return -float(group["lr"]) * gradient


def sample(tensor: Tensor, max_elements: int) -> Tensor:
    """Return a copy of at most `max_elements` evenly spaced elements of a tensor: flat, on its device."""
    return sample_view(tensor, max_elements).clone()


def sample_view(tensor: Tensor, max_elements: int) -> Tensor:
    """Return the elements of `sample`, to be read at once: of a tensor that is not larger they are its own memory."""
    flat = tensor.detach().reshape(-1)
    size = flat.numel()
    return flat if size <= max_elements else flat[:: -(-size // max_elements)].clone()


def differing_share(a: Tensor, b: Tensor) -> float:
    """Return the share of elements in which two tensors differ; two NaNs are equal."""
    if torch.equal(a, b):  # as nearly always: in one pass
        return 0.0
    equal = (a == b) | (torch.isnan(a) & torch.isnan(b))
    return 1.0 - equal.double().mean().item() if a.numel() else 0.0
