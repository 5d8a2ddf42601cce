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
import json, numpy, torch
from benchbox.optim import triton_adamw

f32, f64 = numpy.float32, numpy.float64
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1


def fused(a, b, c):
    return (a.astype(f64) * b.astype(f64) + c.astype(f64)).astype(f32)


def moments(divisor, exp_avg, exp_avg_sq, gradient):
    g = gradient / f32(divisor)
    return fused(numpy.full_like(g, 1 - BETA1), g - exp_avg, exp_avg), fused(f32(1 - BETA2) * g, g, exp_avg_sq * f32(BETA2))


def stepped(step, master, m, v):
    denominator = numpy.sqrt(v) / f32((1 - BETA2**step) ** 0.5) + f32(EPS)
    return master * f32(1 - LR * DECAY) - f32(LR / (1 - BETA1**step)) * m / denominator


generator = torch.Generator().manual_seed(0)
draw = lambda shape: torch.randn(shape, generator=generator)
ulps = {"master": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
is_rounded = True
for step, divisor in ((1, 1.0), (2, 3.7), (1000, 0.25)):
    rows, before = [], []
    for shape in ((5,), (2, triton_adamw.BLOCK), (triton_adamw.BLOCK + 1,)):
        tensors = draw(shape) * 0.02, draw(shape) * 0.1, draw(shape).square() * 0.1
        gradient = draw(shape).bfloat16()
        before.append([tensor.numpy().copy() for tensor in tensors])
        rows.append((*tensors, gradient, torch.zeros_like(gradient)))
    versions = [row[0]._version for row in rows]
    counts = [torch.tensor(float(step)) for _ in rows]
    options = triton_adamw.AdamWOptions(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY)
    triton_adamw.step_adamw(rows, counts, options, torch.tensor(divisor))
    assert all(row[0]._version > version for row, version in zip(rows, versions))
    for row, old in zip(rows, before):
        # A moment in which a sum cancels has a larger relative error, so the step is judged with the moments of the kernel.
        m, v = (moment.numpy() for moment in row[1:3])
        wanted = stepped(step, old[0], m, v), *moments(divisor, *old[1:], row[3].float().numpy())
        for name, ours, theirs, start in zip(ulps, row, wanted, old):
            assert ours.isfinite().all() and (ours.numpy() != start).mean() > 0.9
            # Of the larger one of the values before and after: where a sum cancels, the last place of what is left is finer.
            unit = numpy.spacing(numpy.maximum(abs(theirs), abs(start)))
            ulps[name] = max(ulps[name], float((abs(ours.numpy() - theirs) / unit).max()))
        is_rounded &= torch.equal(row[4], row[0].bfloat16())
print(json.dumps({"ulps": ulps, "is_rounded": is_rounded}))
"""


def test_a_step_is_within_one_unit_in_the_last_place_of_the_formula() -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(distance <= 1 for distance in result["ulps"].values()), result
    assert result["is_rounded"], "live weights are the masters, rounded"
