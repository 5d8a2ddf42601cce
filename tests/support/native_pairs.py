"""Pairs of optimizers for tests of the compiled pass: one with masters, and one over float32 weights."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchbox.optim import MasterWeightOptimizer, native

# Not `library() is None`: if compilation should work and does not, tests must fail.
needs_compiler = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in native.VECTOR_FLAGS or not any(map(shutil.which, native.COMPILERS)),
    reason="no C compiler, or a processor without flags for native.c",
)

SHAPES = [(64, 48), (33, 7), (16,), (5,), (1000, 400), (2**18 + 16,)]
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def pair(**options: Any) -> tuple[MasterWeightOptimizer, list[nn.Parameter], torch.optim.Optimizer, list[nn.Parameter]]:
    """Build an optimizer with masters of bfloat16 parameters and one of float32 parameters, each with two groups."""
    live, full = parameters(torch.bfloat16), parameters(torch.float32)

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:3]}, {"params": params[3:], "lr": 5e-3, "weight_decay": 0.0}]

    arguments = OPTIONS | options
    kind = arguments.pop("kind", torch.optim.AdamW)
    return MasterWeightOptimizer(groups(live), kind, **arguments), live, kind(groups(full), **arguments), full


def step_both(
    ours: MasterWeightOptimizer, live: list, theirs: torch.optim.Optimizer, full: list, step: int, clip: float
) -> None:
    for parameter, reference, gradient in zip(live, full, gradients(step), strict=True):
        parameter.grad, reference.grad = gradient.clone(), gradient.float()
    norm = ours.clip_grad_norm_(clip)
    coefficient = torch.clamp(clip / (norm + 1e-6), max=1.0)
    for reference in full:
        reference.grad.div_(coefficient.reciprocal())
    ours.step()
    theirs.step()


def assert_same(ours: MasterWeightOptimizer, live: list, theirs: torch.optim.Optimizer, full: list) -> None:
    for master, parameter, reference in zip(ours.masters, live, full, strict=True):
        assert torch.equal(master, reference)
        assert torch.equal(parameter, reference.bfloat16())
    for stepped, reference in zip((tensor for _, tensor in ours.stepped()), full, strict=True):
        for name, value in theirs.state[reference].items():
            assert torch.equal(ours.state[stepped][name].view(value.shape), value), name
