"""AdamW over masters in one compiled pass over memory: upcast, clip, step and rounding, without buckets.

A C function on a CPU, a Triton kernel on a GPU.
"""

from __future__ import annotations

import logging
import math
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchbox.optim.fused import fused_step
from benchbox.optim.passes import is_dense, native_functions, step_adamw, supports_native

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

    from benchbox.optim.chunks import ParameterChunk

StepTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # master, moments, gradient, live weights

_log = logging.getLogger(__name__)


def step_in_one_pass(
    inner: Optimizer, group: dict[str, Any], chunks: Iterable[ParameterChunk], divisor: Tensor | None
) -> Iterable[ParameterChunk]:
    """Step the chunks for which the compiled pass gives the bits of torch's fused kernel, and return the remaining ones.

    Args:
        inner: an Adam or AdamW without step hooks (`fused.is_plain_adam`).
        group: a parameter group of `inner`.
        chunks: the chunks of that group.
        divisor: () float32, by which gradients are divided, or None.
    """
    if not _supports_options(group):
        return chunks
    chunks = list(chunks)
    supported = {id(chunk): tensors for chunk in chunks if (tensors := _collect_tensors(inner, chunk)) is not None}
    step = _step_of(group, list(supported.values()))
    if step is None:
        return chunks
    step_counts = [inner.state[chunk.master]["step"] for chunk in chunks if id(chunk) in supported]
    torch._foreach_add_(step_counts, 1)
    step(step_counts, divisor)
    return [chunk for chunk in chunks if id(chunk) not in supported]


def _step_of(group: dict[str, Any], tensors: list[StepTensors]) -> Callable[[list[Tensor], Tensor | None], None] | None:
    """Return a function of step counts and divisor that steps these tensors in one pass, or None if there is none."""
    devices = {master.device for master, *_ in tensors}
    if devices == {torch.device("cpu")}:
        functions = native_functions(sum(master.numel() for master, *_ in tensors))
        return None if functions is None or not _matches_torch(functions) else partial(_step_on_cpu, functions, group, tensors)
    if len(devices) == 1 and next(iter(devices)).type == "cuda" and _has_triton():
        return partial(_step_on_gpu, group, tensors)
    return None


def _step_on_cpu(
    functions: ctypes.CDLL, group: dict[str, Any], tensors: list[StepTensors], step_counts: list[Tensor], divisor: Tensor | None
) -> None:
    divisor_value = 1.0 if divisor is None else divisor.item()
    coefficients = [(divisor_value, *_coefficients(group, count.item())) for count in step_counts]
    step_adamw(functions, list(zip(tensors, coefficients, strict=True)))


def _step_on_gpu(group: dict[str, Any], tensors: list[StepTensors], step_counts: list[Tensor], divisor: Tensor | None) -> None:
    from benchbox.optim import triton_adamw

    (beta1, beta2), device = group["betas"], tensors[0][0].device
    options = triton_adamw.AdamWOptions(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
    divisor = torch.ones((), device=device) if divisor is None else divisor.to(device)
    triton_adamw.step_adamw(tensors, step_counts, options, divisor)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _supports_options(group: dict[str, Any]) -> bool:
    numbers = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    return (
        group["fused"]
        and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
        and (group["decoupled_weight_decay"] or group["weight_decay"] == 0)
        and all(isinstance(number, float | int) for number in numbers)
        and group["betas"][0] > 0.5  # below, torch interpolates from the other end
    )


def _collect_tensors(inner: Optimizer, chunk: ParameterChunk) -> StepTensors | None:
    """Return master, moments, gradient and live weights of a chunk, or None if the pass does not support them."""
    full_gradient, state = chunk.parameter.grad, inner.state.get(chunk.master)
    # torch creates the initial state. A chunk of a gradient with another memory layout would be a copy of the full gradient.
    if full_gradient is None or not is_dense(full_gradient) or not state:
        return None
    masters = chunk.master, state["exp_avg"], state["exp_avg_sq"]
    gradient, live = chunk.select(full_gradient), chunk.live()
    is_supported = (
        all(tensor.dtype == torch.float32 for tensor in masters)
        and live.dtype == gradient.dtype == torch.bfloat16
        and (supports_native if live.device.type == "cpu" else _are_dense)(*masters, gradient, live)
    )
    return (*masters, gradient, live) if is_supported else None


def _are_dense(*tensors: Tensor) -> bool:
    return all(map(is_dense, tensors))


def _coefficients(group: dict[str, Any], step: float) -> tuple[float, ...]:
    """Compute the coefficients of `adamw` in native.c after `divisor`, in double precision as torch's kernel does."""
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
def _matches_torch(functions: ctypes.CDLL) -> bool:
    """Return whether a trial step gives the bits of torch's kernel, whose fused operations depend on the build of torch."""
    grid = torch.linspace(-1.0, 1.0, 4096, dtype=torch.float32, device="cpu")
    gradient, divisor, step = grid.mul(7.0).sin().bfloat16(), 3.0, 4.0
    master, exp_avg, exp_avg_sq, live = grid.clone(), grid.flip(0), grid.square(), torch.empty_like(gradient)
    reference = nn.Parameter(grid.clone())
    reference.grad = gradient.float()
    inner = torch.optim.AdamW([reference], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    state = {"step": torch.tensor(step, device="cpu"), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
    inner.state[reference] = state
    with torch.no_grad():
        fused_step(inner, torch.tensor(divisor, dtype=torch.float32, device="cpu"))
    coefficients = divisor, *_coefficients(inner.param_groups[0], step + 1)
    step_adamw(functions, [((master, exp_avg, exp_avg_sq, gradient, live), coefficients)])
    pairs = (
        (master, reference),
        (exp_avg, state["exp_avg"]),
        (exp_avg_sq, state["exp_avg_sq"]),
        (live, reference.bfloat16()),
    )
    matches = all(torch.equal(actual, expected) for actual, expected in pairs)
    if not matches:
        _log.info("optimizer steps on CPUs use torch's slower kernels: native.c rounds differently from this build of torch")
    return matches
