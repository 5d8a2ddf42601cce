"""AdamW over masters in one compiled pass: upcast, clip, step and rounding of a whole group, without a bucket in between."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchbox.optim.fused import fused_step
from benchbox.optim.passes import adamw, functions_for, in_memory, passable

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable

    from torch.optim import Optimizer

    from benchbox.optim.chunks import Piece

_log = logging.getLogger(__name__)


def step_in_one_pass(
    inner: Optimizer, group: dict[str, Any], pieces: Iterable[Piece], divisor: Tensor | None
) -> Iterable[Piece]:
    """Step those pieces of a group for which the pass gives what torch's fused kernel would, bit for bit, and answer the rest.

    Args:
        inner: an Adam or AdamW that nobody watches (`fused.is_plain`).
        group: of `inner`.
        pieces: of that group.
        divisor: () float32, what gradients are divided by, or None.
    """
    if not _has_a_pass(group):
        return pieces
    pieces = list(pieces)
    taken = {id(piece): tensors for piece in pieces if (tensors := _tensors(inner, piece)) is not None}
    functions = functions_for(sum(tensors[0].numel() for tensors in taken.values()))
    if functions is None or not _agrees_with_torch(functions):
        return pieces
    counts = [inner.state[piece.master]["step"] for piece in pieces if id(piece) in taken]
    torch._foreach_add_(counts, 1)
    scale = 1.0 if divisor is None else divisor.item()
    coefficients = [(scale, *_coefficients(group, count.item())) for count in counts]
    adamw(functions, list(zip(taken.values(), coefficients, strict=True)))
    return [piece for piece in pieces if id(piece) not in taken]


def _has_a_pass(group: dict[str, Any]) -> bool:
    numbers = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    return (
        group["fused"]
        and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
        and (group["decoupled_weight_decay"] or group["weight_decay"] == 0)
        and all(isinstance(number, float | int) for number in numbers)
        and group["betas"][0] > 0.5  # below, torch interpolates from the other end
    )


def _tensors(inner: Optimizer, piece: Piece) -> tuple[Tensor, ...] | None:
    """Master, moments, gradient and live weight of a piece that the pass can step."""
    whole, state = piece.parameter.grad, inner.state.get(piece.master)
    # The first state torch makes, in its own way. A part of a gradient laid out otherwise would be a copy of all of it.
    if whole is None or not in_memory(whole) or not state:
        return None
    kept = piece.master, state["exp_avg"], state["exp_avg_sq"]
    gradient, live = piece.part(whole), piece.live()
    fits = (
        all(tensor.dtype == torch.float32 for tensor in kept)
        and live.dtype == gradient.dtype == torch.bfloat16
        and passable(*kept, gradient, live)
    )
    return (*kept, gradient, live) if fits else None


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


@cache
def _agrees_with_torch(functions: ctypes.CDLL) -> bool:
    """Whether a step gives the bits of torch's kernel, tried once. Which operations that fuses, the build of torch decides."""
    grid = torch.linspace(-1.0, 1.0, 4096, dtype=torch.float32, device="cpu")
    gradient, divisor, count = grid.mul(7.0).sin().bfloat16(), 3.0, 4.0
    master, first, second, live = grid.clone(), grid.flip(0), grid.square(), torch.empty_like(gradient)
    reference = nn.Parameter(grid.clone())
    reference.grad = gradient.float()
    inner = torch.optim.AdamW([reference], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    state = {"step": torch.tensor(count, device="cpu"), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    inner.state[reference] = state
    with torch.no_grad():
        fused_step(inner, torch.tensor(divisor, dtype=torch.float32, device="cpu"))
    coefficients = divisor, *_coefficients(inner.param_groups[0], count + 1)
    adamw(functions, [((master, first, second, gradient, live), coefficients)])
    pairs = ((master, reference), (first, state["exp_avg"]), (second, state["exp_avg_sq"]), (live, reference.bfloat16()))
    agrees = all(torch.equal(ours, torchs) for ours, torchs in pairs)
    if not agrees:
        _log.info("optimizer steps on CPUs take torch's slower kernels: native.c rounds otherwise than this build of torch")
    return agrees
