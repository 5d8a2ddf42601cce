"""FlexAttention computes what the other kernels compute, forward and backward."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch
from benchbox_policies._layers.nn.attention import attend
from benchbox_policies._layers.sequence.attention_mask import AttentionMask
from torch._dynamo.utils import counters

from benchbox.session.build import open_cell_data
from tests.support.policy_batches import build, gradients, make_batch
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from benchbox.registry.contracts import AttentionKernel, Batch

BATCH, QUERIES, WINDOW = 2, 300, 64


def attention_mask(device: torch.device) -> AttentionMask:
    """Return a prefix of 100 tokens, causal tokens after it, and padding at the end of the second sample."""
    positions = torch.arange(QUERIES, device=device)
    groups = (positions - 100).clamp(min=0)
    valid = torch.ones(BATCH, QUERIES, dtype=torch.bool, device=device)
    valid[1, -20:] = False
    batch_positions = positions.expand(BATCH, -1)
    return AttentionMask(
        query_groups=groups,
        key_groups=groups,
        query_valid=valid,
        key_valid=valid,
        query_positions=batch_positions,
        key_positions=batch_positions,
    )


def attention(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, groups: int, width: int, window: int | None
) -> list[torch.Tensor]:
    """Return the output of valid queries, and the gradients of query, key and value, for the same numbers at every call."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((BATCH, 8, QUERIES, width), *[(BATCH, groups, QUERIES, width)] * 2)
    numbers = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    inputs = [tensor.to(device=device, dtype=dtype).requires_grad_() for tensor in numbers]
    mask = attention_mask(device)
    output = attend(*inputs, mask.build(kernel, window), kernel)
    output = output * mask.query_valid[..., None]
    output.float().square().sum().backward()
    return [output.detach(), *(tensor.grad for tensor in inputs)]


def relative_error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    return float((tensor.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("window", [None, WINDOW], ids=["global", "window"])
@pytest.mark.parametrize(("groups", "width"), [(1, 256), (4, 64), (8, 16)], ids=["pi05", "grouped", "narrow"])
def test_flex_is_as_near_to_float32_as_sdpa(device: torch.device, groups: int, width: int, window: int | None) -> None:
    """In bfloat16, output and gradients of each kernel differ from those of eager attention in float32 by rounding alone."""
    reference = attention("eager", device, torch.float32, groups, width, window)
    kernels: tuple[AttentionKernel, ...] = ("eager", "sdpa", "flex") if device.type == "cuda" else ("eager", "sdpa")
    errors = {
        kernel: [
            relative_error(*pair)
            for pair in zip(attention(kernel, device, torch.bfloat16, groups, width, window), reference, strict=True)
        ]
        for kernel in kernels
    }
    assert all(error < 0.02 for kernel_errors in errors.values() for error in kernel_errors), errors


def train_once(kernel: AttentionKernel, device: torch.device, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    policy = build("pi07_low_level", attention=kernel).to(device)
    loss = policy(batch).total
    loss.backward()
    return loss.item(), gradients(policy)


def test_a_policy_has_the_same_loss_and_gradients_with_every_kernel(device: torch.device) -> None:
    """In float32; the backbone of pi07 has windowed and global layers, its expert queries that are not all keys."""
    batch = {name: tensor.to(device) for name, tensor in make_batch(build("pi07_low_level").batch_spec(), 2).items()}
    loss, expected = train_once("eager", device, batch)
    assert any(gradient.any() for gradient in expected.values())
    kernels: tuple[AttentionKernel, ...] = ("sdpa", "flex") if device.type == "cuda" else ("sdpa",)
    for kernel in kernels:
        kernel_loss, actual = train_once(kernel, device, batch)
        assert kernel_loss == pytest.approx(loss, rel=1e-4), kernel
        difference = torch.stack([(actual[name] - expected[name]).norm() for name in expected]).norm()
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        assert difference < 2e-3 * norm, kernel


def test_later_batches_compile_nothing(cuda: torch.device) -> None:
    """A mask is a new function in every step; recompiling for each would soon end compilation altogether."""
    policy = build("pi07_low_level", attention="flex").to(cuda)
    graphs = []
    for seed in range(3):
        batch = make_batch(policy.batch_spec(), 2, seed)
        policy({name: tensor.to(cuda) for name, tensor in batch.items()}).total.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[0] == graphs[1] == graphs[2]


@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
def test_a_policy_whose_blocks_come_and_go_stays_compiled(cuda: torch.device) -> None:
    """Every absence of a block is another length, and beyond torch's limit of variants FlexAttention would run uncompiled."""
    cell = tiny_cell(policy="pi07_low_level", backend="single", world_size=1, batch=1)
    policy = build("pi07_low_level", attention="flex").to(cuda)
    before = counters["stats"]["unique_graphs"]
    with closing(open_cell_data(cell, policy, rank=0)) as stream:
        for _ in range(12):
            policy({name: tensor.to(cuda) for name, tensor in next(stream).items()}).total.backward()
    assert counters["stats"]["unique_graphs"] - before > 8, "the batches have too few lengths to reach torch's limit"
