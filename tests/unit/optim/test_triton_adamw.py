"""The Triton kernel of AdamW over masters, in Triton's interpreter: without a GPU it computes the same numbers, slowly."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.optim import one_pass
from benchbox.optim.chunks import ParameterChunk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Triton reads TRITON_INTERPRET when it is imported, so the kernel runs in a process of its own. Each step begins with the same
# state on both sides.
SCRIPT = """
import json, numpy, torch
from benchbox.optim import triton_adamw

f32, f64 = numpy.float32, numpy.float64
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1


def fused(a, b, c):
    return (f64(a) * b.astype(f64) + c.astype(f64)).astype(f32)


def moments(divisor, exp_avg, exp_avg_sq, gradient):
    g = gradient / f32(divisor)
    return fused(f32(1 - BETA1), g - exp_avg, exp_avg), fused(f32(1 - BETA2), g * g - exp_avg_sq, exp_avg_sq)


def stepped(step, master, m, v):
    denominator = numpy.sqrt(v) / f32((1 - BETA2**step) ** 0.5) + f32(EPS)
    return fused(f32(-LR * DECAY), master, master) - f32(LR / (1 - BETA1**step)) * m / denominator


def rows_of(tensors):
    return [triton_adamw.StepRow(*[tensor.data_ptr() for tensor in row], size=row[0].numel()) for row in tensors]


generator = torch.Generator().manual_seed(0)
draw = lambda shape: torch.randn(shape, generator=generator)
names = "master", "exp_avg", "exp_avg_sq"
ulps = dict.fromkeys(names, 0.0)
is_rounded = counts_are_right = True
for step, divisor in ((1, 1.0), (2, 3.7), (1000, 0.25)):
    rows, before = [], []
    # Shorter than a program, as long as some, one element longer, and at an address without the alignment of vectors.
    for elements, start in ((5, 0), (2 * triton_adamw.BLOCK, 0), (triton_adamw.BLOCK + 1, 0), (triton_adamw.BLOCK, 1)):
        drawn = draw((3, elements + start))
        tensors = [row[start:] for row in (drawn[0] * 0.02, drawn[1] * 0.1, drawn[2].square())]
        gradient = draw(elements).bfloat16()
        before.append([tensor.numpy().copy() for tensor in tensors])
        rows.append((*tensors, gradient, torch.zeros_like(gradient), torch.tensor(step - 1.0)))
    options = triton_adamw.AdamWOptions(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY)
    triton_adamw.step_adamw(rows_of(rows), options, torch.tensor(divisor))
    for row, old in zip(rows, before):
        # A moment in which a sum cancels has a larger relative error, so the step is judged with the moments of the kernel.
        m, v = (moment.numpy() for moment in row[1:3])
        wanted = stepped(step, old[0], m, v), *moments(divisor, *old[1:], row[3].float().numpy())
        for name, ours, theirs, start in zip(names, row, wanted, old):
            assert ours.isfinite().all() and (ours.numpy() != start).mean() > 0.9
            # Of the larger one of the values before and after: where a sum cancels, the last place of what is left is finer.
            unit = numpy.spacing(numpy.maximum(abs(theirs), abs(start)))
            ulps[name] = max(ulps[name], float((abs(ours.numpy() - theirs) / unit).max()))
        is_rounded &= torch.equal(row[4], row[0].bfloat16())
        counts_are_right &= float(row[5]) == step
# 1 - lr * weight_decay has one digit in float32, and the mean decay of many weights has more.
master = 1.0 + torch.rand(4096, generator=generator)
before = master.double()
row = master, torch.zeros(4096), torch.ones(4096), *torch.zeros(2, 4096).bfloat16(), torch.zeros(())
for _ in range(32):
    triton_adamw.step_adamw(rows_of([row]), triton_adamw.AdamWOptions(LR, BETA1, BETA2, EPS, 1.5e-4), torch.tensor(1.0))
decayed = float((1 - master.double() / before).mean()) / (32 * LR * 1.5e-4)
# Programs that build models of transformers often leave another default dtype behind.
masters = []
for dtype in (torch.float32, torch.bfloat16):
    row = torch.full((8,), 0.5), torch.full((8,), 0.1), torch.ones(8), *torch.ones(2, 8).bfloat16(), torch.tensor(2.0)
    one = torch.tensor(1.0)
    torch.set_default_dtype(dtype)
    triton_adamw.step_adamw(rows_of([row]), options, one)
    torch.set_default_dtype(torch.float32)
    masters.append(row[0])
print(json.dumps({
    "ulps": ulps, "is_rounded": is_rounded, "counts_are_right": counts_are_right, "decayed": decayed,
    "default_dtype_matters": not torch.equal(*masters),
}))
"""


def test_a_step_is_within_one_unit_in_the_last_place_of_the_formula() -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(distance <= 1 for distance in result["ulps"].values()), result
    assert result["is_rounded"], "live weights are the masters, rounded"
    assert result["counts_are_right"]
    assert not result["default_dtype_matters"]
    assert result["decayed"] == pytest.approx(1.0, abs=0.05)


OPTIMIZER = """
import contextlib, json, torch
from torch import nn
from benchbox.optim import MasterWeightOptimizer, chunks, one_pass

chunks.BUCKET_ELEMENTS["cpu"] = 1024
torch.cuda.device = lambda device: contextlib.nullcontext()
native, stepped = one_pass._step_on_cpu, []
one_pass._step_on_cpu = lambda inner, group, *rest: stepped.append(rest[0]) or one_pass._step_on_gpu(inner, group, *rest)

torch.manual_seed(0)
shapes = (2560,), (8, 6), (1040,), (16,)  # whole vectors: on a CPU others are left to torch
full = [torch.randn(shape) * 0.02 for shape in shapes]
live = [nn.Parameter(tensor.bfloat16()) for tensor in full[:3]] + [nn.Parameter(full[3].clone())]  # the last is not supported
reference = [nn.Parameter(tensor.clone()) for tensor in full]
arguments = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
optimizer = MasterWeightOptimizer(live, torch.optim.AdamW, masters=full, **arguments)
plain = torch.optim.AdamW(reference, **arguments)
versions = []
for _ in range(4):
    for parameter, other in zip(live, reference):
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        other.grad = parameter.grad.float().clone()
    versions.append([parameter._version for parameter in live])
    torch.nn.utils.clip_grad_norm_(reference, 0.5)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    plain.step()
versions.append([parameter._version for parameter in live])
masters = optimizer.masters
print(json.dumps({
    "calls": len(stepped),
    "difference": max(float((master - other).abs().max()) for master, other in zip(masters, reference)),
    "is_rounded": all(torch.equal(parameter, master.to(parameter.dtype)) for parameter, master in zip(live, masters)),
    "versions": all(later > earlier for old, new in zip(versions, versions[1:]) for earlier, later in zip(old, new)),
    "counts": sorted({float(state["step"]) for state in optimizer.inner.state.values()}),
}))
"""


def test_chunks_of_a_weight_are_stepped_at_their_addresses() -> None:
    """Through the optimizer: weights in one chunk and in three, a clip, and one that the kernel leaves to torch."""
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", OPTIMIZER], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["calls"] == 4
    assert result["difference"] < 1e-7
    assert result["is_rounded"]
    assert result["versions"], "autograd is told of every write"
    assert result["counts"] == [4.0]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step_count"])
def test_state_on_another_device_is_left_to_torch(name: str) -> None:
    """Leave it to torch, since the kernel would read its tensors by their addresses, where they are not."""
    there, here = torch.zeros(4, device="meta"), torch.zeros(4)
    state = {"exp_avg": there, "exp_avg_sq": there, "step_count": there}
    halves = there.bfloat16(), there.bfloat16()

    def supports(state: dict[str, torch.Tensor]) -> bool:
        chunk = ParameterChunk(there, there)
        masters = there, state["exp_avg"], state["exp_avg_sq"]
        return one_pass._supports(one_pass._SteppedChunk(chunk, masters, *halves, state["step_count"]))

    assert supports(state)
    assert not supports(state | {name: here})
    assert not supports(state | {name: there.double()})


WITHOUT_COMPILER = """
import torch
from benchbox.optim import one_pass

torch.cuda.is_available = lambda: True
print(one_pass._has_triton())
"""


def test_without_a_c_compiler_masters_are_stepped_by_torch(tmp_path: Path) -> None:
    """Triton compiles its launcher at the first kernel, and would end the second step of a training."""
    folders = dict.fromkeys(("PATH", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH"), str(tmp_path))
    variables = {**os.environ, **folders, "OMP_NUM_THREADS": "1"}
    variables.pop("CC", None)
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert "use torch's slower kernels: Triton cannot start a kernel: Failed to find C compiler" in done.stderr
