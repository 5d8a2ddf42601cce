"""AdamW over masters in one compiled pass: upcast, clip, step and rounding of a whole group, without a bucket in between."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from benchbox.optim.passes import adamw, functions_for, passable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from benchbox.optim.pieces import Held, Piece


def step_in_one_pass(inner: Optimizer, group: dict[str, Any], held: Held, divisor: Tensor | None) -> Held:
    """Step those pieces of a group for which the pass gives what torch's fused kernel would, bit for bit, and answer the rest.

    Args:
        inner: an Adam or AdamW that nobody watches (`fused.is_plain`).
        group: of `inner`.
        held: pieces of that group, with their gradients.
        divisor: () float32, what gradients are divided by, or None.
    """
    if not _has_a_pass(group):
        return held
    taken = [pair for pair in held if _fits(inner, *pair)]
    functions = functions_for(sum(gradient.numel() for _, gradient in taken))
    if functions is None:
        return held
    scale = 1.0 if divisor is None else divisor.item()
    torch._foreach_add_([inner.state[piece.master]["step"] for piece, _ in taken], 1)
    steps = []
    for piece, gradient in taken:
        state = inner.state[piece.master]
        tensors = piece.master, state["exp_avg"], state["exp_avg_sq"], gradient, piece.live()
        steps.append((tensors, (scale, *_coefficients(group, state["step"].item()))))
    adamw(functions, steps)
    stepped = {id(piece) for piece, _ in taken}
    return [pair for pair in held if id(pair[0]) not in stepped]


def _has_a_pass(group: dict[str, Any]) -> bool:
    numbers = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    return (
        group["fused"]
        and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
        and (group["decoupled_weight_decay"] or group["weight_decay"] == 0)
        and all(isinstance(number, float | int) for number in numbers)
        and group["betas"][0] > 0.5  # below, torch interpolates from the other end
    )


def _fits(inner: Optimizer, piece: Piece, gradient: Tensor) -> bool:
    state = inner.state.get(piece.master)
    if not state:  # torch makes the first state, in its own way
        return False
    kept = piece.master, state["exp_avg"], state["exp_avg_sq"]
    live = piece.live()
    return (
        all(tensor.dtype == torch.float32 for tensor in kept)
        and live.dtype == gradient.dtype == torch.bfloat16
        and passable(*kept, gradient, live)
    )


def _coefficients(group: dict[str, Any], step: float) -> tuple[float, ...]:
    """Formed in double, as torch's kernel does: decay, first share, second kept, second share, correction, epsilon, rate."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    return (
        1.0 - lr * group["weight_decay"],
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2**step),
        group["eps"],
        lr / (1.0 - beta1**step),
    )
