"""The Triton kernel of AdamW over masters, in Triton's interpreter: without a GPU it computes the same numbers, slowly."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Triton reads TRITON_INTERPRET when it is imported, so the kernel runs in a process of its own. Each step begins with the same
# state on both sides. The tensors are shorter than a program, as long as some, and one element longer.
SCRIPT = """
import json, sys, numpy, torch
from benchbox.optim import triton_adamw
from torch import nn

generator = torch.Generator().manual_seed(0)
draw = lambda shape: torch.randn(shape, generator=generator)
block = triton_adamw.BLOCK
options = triton_adamw.AdamWOptions(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
arguments = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
ulps = {"master": 0, "exp_avg": 0, "exp_avg_sq": 0}
is_rounded = True
for step, divisor in ((1, 1.0), (2, 3.7), (1000, 0.25)):
    rows, expected, before = [], [], []
    for shape in ((5,), (2, block), (block + 1,)):
        master, gradient = draw(shape) * 0.02, draw(shape).bfloat16()
        exp_avg, exp_avg_sq = draw(shape) * 0.1, draw(shape).square() * 0.1
        reference = nn.Parameter(master.clone())
        reference.grad = gradient.float().div(divisor)
        optimizer = torch.optim.AdamW([reference], **arguments)
        state = {"step": torch.tensor(step - 1.0), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
        optimizer.state[reference] = state
        optimizer.step()
        rows.append((master, exp_avg, exp_avg_sq, gradient, torch.zeros_like(gradient)))
        before.append([tensor.clone() for tensor in (master, exp_avg, exp_avg_sq)])
        expected.append((reference.detach(), state["exp_avg"], state["exp_avg_sq"]))
    versions = [row[0]._version for row in rows]
    counts = [torch.tensor(float(step)) for _ in rows]
    triton_adamw.step_adamw(rows, counts, options, torch.tensor(divisor))
    assert all(row[0]._version > version for row, version in zip(rows, versions))
    for row, wanted, old in zip(rows, expected, before):
        for name, ours, theirs, start in zip(ulps, row, wanted, old):
            assert ours.isfinite().all() and not torch.equal(ours, start)
            # Of the larger one of the values before and after: where a sum cancels, the last place of what is left is finer.
            unit = numpy.spacing(torch.maximum(theirs.abs(), start.abs()).numpy())
            ulps[name] = max(ulps[name], float(((ours - theirs).abs().numpy() / unit).max()))
        is_rounded &= torch.equal(row[4], row[0].bfloat16())
print(json.dumps({"ulps": ulps, "is_rounded": is_rounded}))
"""


def test_a_step_is_within_one_unit_in_the_last_place_of_torchs() -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(distance <= 1 for distance in result["ulps"].values()), result
    assert result["is_rounded"], "live weights are the masters, rounded"
