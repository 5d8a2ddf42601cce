"""AdamW over masters in one compiled pass over memory: upcast, clip, step and rounding, without buckets.

A C function on a CPU, a Triton kernel on a GPU.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from benchbox.errors import reason_of
from benchbox.optim.fused import fused_step
from benchbox.optim.native import AdamWJob
from benchbox.optim.passes import announced, is_dense, native_functions, step_adamw, supports_native

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from benchbox.optim.chunks import ParameterChunk


class _SteppedChunk(NamedTuple):
    """A chunk that the pass supports: its state, and gradient and live weights of the whole parameter."""

    chunk: ParameterChunk
    masters: tuple[Tensor, Tensor, Tensor]  # with the moments
    gradient: Tensor
    live: Tensor
    step_count: Tensor

    def addresses(self) -> tuple[int, int, int, int, int]:
        """Return where master, exp_avg, exp_avg_sq, gradient and live weights of this chunk begin.

        Not by views of gradient and weights: on a GPU these took longer than the kernel, on a CPU a hundredth of the pass.
        """
        offset = 2 * (self.chunk.start or 0)  # bytes of bfloat16
        master, exp_avg, exp_avg_sq = (tensor.data_ptr() for tensor in self.masters)
        return master, exp_avg, exp_avg_sq, self.gradient.data_ptr() + offset, self.live.data_ptr() + offset


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
    devices = {chunk.master.device for chunk in chunks}
    if devices == {torch.device("cpu")}:
        return _step_on_cpu(inner, group, chunks, divisor)
    if len(devices) == 1 and next(iter(devices)).type == "cuda" and min(group["betas"]) > 0.5 and _has_triton():
        return _step_on_gpu(inner, group, chunks, divisor)
    return chunks


def _step_on_cpu(
    inner: Optimizer, group: dict[str, Any], chunks: list[ParameterChunk], divisor: Tensor | None
) -> list[ParameterChunk]:
    supported, remaining = _split_supported(inner, chunks)
    functions = native_functions(sum(stepped.masters[0].numel() for stepped in supported))
    if functions is None or not _matches_torch(functions):
        return chunks
    torch._foreach_add_([stepped.step_count for stepped in supported], 1)
    divisor_value = 1.0 if divisor is None else divisor.item()
    steps = [stepped.step_count.item() for stepped in supported]
    coefficients = {step: (divisor_value, *_coefficients(group, step)) for step in set(steps)}
    jobs = [
        AdamWJob(stepped.masters[0].numel(), *stepped.addresses(), *coefficients[step])
        for stepped, step in zip(supported, steps, strict=True)
    ]
    with _tensors_announced(supported):
        step_adamw(functions, jobs)
    return remaining


def _step_on_gpu(
    inner: Optimizer, group: dict[str, Any], chunks: list[ParameterChunk], divisor: Tensor | None
) -> list[ParameterChunk]:
    from benchbox.optim import triton_adamw

    supported, remaining = _split_supported(inner, chunks)
    if not supported:
        return remaining
    rows = [
        triton_adamw.StepRow(*stepped.addresses(), stepped.step_count.data_ptr(), stepped.masters[0].numel())
        for stepped in supported
    ]
    device = chunks[0].master.device
    options = triton_adamw.AdamWOptions(*map(float, (group["lr"], *group["betas"], group["eps"], group["weight_decay"])))
    divisor = torch.ones((), dtype=torch.float32, device=device) if divisor is None else divisor.to(device)
    with _tensors_announced(supported), torch.cuda.device(device):
        triton_adamw.step_adamw(rows, options, divisor)  # Triton launches on the current device
    return remaining


@contextmanager
def _tensors_announced(supported: Sequence[_SteppedChunk]) -> Iterator[None]:
    """Run a pass inside the with block, and tell its listeners and autograd which tensors it reads and writes."""
    masters = [tensor for stepped in supported for tensor in stepped.masters]
    gradients = {id(stepped.gradient): stepped.gradient for stepped in supported}.values()
    written = [*masters, *{id(stepped.live): stepped.live for stepped in supported}.values()]
    with announced("adamw", lambda: ([*masters, *gradients], written)):
        yield
    # Autograd refuses a backward pass over weights written since the forward pass, but only torch's own operations inform it.
    torch.autograd.graph.increment_version(written)


@cache
def _has_triton() -> bool:
    """Return whether Triton can start kernels on a GPU. It compiles its own launcher, and images often lack a C compiler."""
    if find_spec("triton") is None:
        return False
    from triton.runtime import driver

    try:
        driver.active  # noqa: B018 (the launcher is compiled at the first access)
    except Exception as error:  # noqa: BLE001 (whatever the compiler, or the search for the CUDA driver, raises)
        _log.warning("optimizer steps on GPUs use torch's slower kernels: Triton cannot start a kernel: %s", reason_of(error))
        return False
    return True


def _supports_options(group: dict[str, Any]) -> bool:
    numbers = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    return (
        group["fused"]
        and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
        and (group["decoupled_weight_decay"] or group["weight_decay"] == 0)
        and all(isinstance(number, float | int) for number in numbers)
        and group["betas"][0] > 0.5  # below, torch interpolates from the other end
    )


def _split_supported(inner: Optimizer, chunks: Iterable[ParameterChunk]) -> tuple[list[_SteppedChunk], list[ParameterChunk]]:
    """Return the chunks that the pass supports, and the others.

    All that is known of a parameter is found out once, not for each chunk: after a backward pass nothing of this is in a cache,
    and it took 0.8 ms beside 17 ms of the pass itself.
    """
    supported: list[_SteppedChunk] = []
    remaining = []
    full: dict[int, tuple[Tensor, Tensor] | None] = {}
    for chunk in chunks:
        key = id(chunk.parameter)
        if key not in full:
            full[key] = _gradient_and_live(chunk.parameter)
        pair, state = full[key], inner.state.get(chunk.master)
        if pair is None or not state:  # torch creates the initial state
            remaining.append(chunk)
            continue
        stepped = _SteppedChunk(chunk, (chunk.master, state["exp_avg"], state["exp_avg_sq"]), *pair, state["step"])
        if _supports(stepped):
            supported.append(stepped)
        else:
            remaining.append(chunk)
    return supported, remaining


def _gradient_and_live(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return gradient and live weights of a parameter, or None if the pass does not support them."""
    gradient, live = parameter.grad, parameter.detach()
    if gradient is None or not gradient.dtype == live.dtype == torch.bfloat16 or not (is_dense(gradient) and is_dense(live)):
        return None
    return gradient, live


def _supports(stepped: _SteppedChunk) -> bool:
    """Return whether all tensors are where and what the pass takes them for: it knows their addresses alone."""
    device = stepped.masters[0].device
    supports = supports_native if device.type == "cpu" else is_dense
    for tensor in (*stepped.masters, stepped.step_count):
        if tensor.dtype != torch.float32 or tensor.device != device:
            return False
    return stepped.live.device == device and all(map(supports, stepped.masters))


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
    addresses = [tensor.data_ptr() for tensor in (master, exp_avg, exp_avg_sq, gradient, live)]
    step_adamw(functions, [AdamWJob(grid.numel(), *addresses, *coefficients)])
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
