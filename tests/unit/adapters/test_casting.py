"""Dtypes of modules of others: inputs follow the weights, buffers keep theirs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import benchbox
from benchbox.errors import ConfigurationError
from tests.support.foreign import batch_of, built_directly


def dtypes(policy):
    return {name: buffer.dtype for name, buffer in policy.module.named_buffers()}


@pytest.mark.parametrize(
    "cast", [lambda p: p.to(torch.bfloat16), lambda p: p.bfloat16(), lambda p: p.half()], ids=["to", "bfloat16", "half"]
)
def test_buffers_keep_dtype_and_values_under_a_cast_of_the_policy(cast):
    """Integer and non-persistent ones too; DeepSpeed casts by `bfloat16()`."""
    policy = built_directly()
    before = {name: buffer.clone() for name, buffer in policy.module.named_buffers()}
    cast(policy)
    assert {p.dtype for p in policy.parameters()} != {torch.float32}
    assert dtypes(policy)["positions"] == torch.float32
    assert dtypes(policy)["indices"] == torch.int64
    assert all(torch.equal(before[name], buffer) for name, buffer in policy.module.named_buffers())


def test_a_module_written_for_float32_runs_with_bfloat16_weights():
    """Its inputs are float32 in the first layer, after a buffer was added, and after the batch norm."""
    policy = built_directly().eval()
    batch = batch_of(policy)
    full = policy(batch).total
    rounded = policy.to(torch.bfloat16)(batch).total
    rounded.backward()
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.bfloat16}
    assert 0 < abs(float(full - rounded)) < 0.05


def test_autocast_is_left_alone():
    policy = built_directly()
    seen = []
    policy.module.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        policy(batch_of(policy))
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_computes_as_torch_does(momentum, training):
    from benchbox.adapters.casting import cast_inputs_to_weights

    ours, torchs = (nn.BatchNorm1d(4, momentum=momentum).train(training) for _ in range(2))
    cast_inputs_to_weights(ours)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(8, 4, generator=generator)
        assert torch.equal(ours(x), torchs(x))
    for name, buffer in torchs.named_buffers():
        assert torch.equal(dict(ours.named_buffers())[name], buffer), name


class Grid(nn.Module):
    """A product of activations with a buffer, as a spatial softmax computes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("grid", torch.rand(4, 2))
        self.conv = nn.Linear(4, 4)

    def forward(self, x):
        return self.conv(x).softmax(dim=-1) @ self.grid


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.grid_softmax = nn.Linear(4, 4), Grid()

    def forward(self, x):
        return self.grid_softmax(self.first(x))


def test_a_buffer_in_a_product_with_activations_is_named_to_follow_them():
    def batch(size, seed):
        return torch.ones(size, 4)

    policy = benchbox.adapt(Outer(), loss=torch.mean, batch=batch).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        policy(batch_of(policy))
    policy = benchbox.adapt(Outer(), loss=torch.mean, batch=batch, cast_buffers=["grid"]).to(torch.bfloat16)
    assert policy(batch_of(policy)).total.dtype == torch.float32
    assert policy.module.grid_softmax.grid.dtype == torch.bfloat16
    with pytest.raises(ConfigurationError, match="Outer has no floating-point buffer 'gird'; grid"):
        benchbox.adapt(Outer(), loss=torch.mean, batch=batch, cast_buffers=["gird"])
