from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchbox.measure.flops import DEVICE_PEAKS, FlopCounter, utilisation
from benchbox.observer.hooks.dispatch import OperationDispatchMode

H200 = "NVIDIA H200"


def count_flops(function):
    counter = FlopCounter()
    with OperationDispatchMode(counter):
        function().sum().backward()
    return counter


def test_a_linear_layer_by_hand():
    """Forward is 2 B I O; backward as much for the weight, and for the input where that needs a gradient."""
    layer, x = nn.Linear(16, 32), torch.randn(8, 16)
    product = 2 * 8 * 16 * 32
    assert count_flops(lambda: layer(x)).total == 2 * product
    x.requires_grad_()
    assert count_flops(lambda: layer(x)).total == 3 * product


def test_attention_is_the_same_work_by_whatever_kernel():
    """Two products forward and four backward; the fused backward forms the scores again, which is recomputation."""
    q = torch.randn(2, 3, 8, 16, requires_grad=True)
    product = 2 * 2 * 3 * 8 * 8 * 16
    eager = count_flops(lambda: (q @ q.transpose(-1, -2)).softmax(-1) @ q)
    fused = count_flops(lambda: F.scaled_dot_product_attention(q, q, q))
    assert (eager.total, eager.recomputed) == (6 * product, 0)
    assert (fused.total, fused.recomputed) == (7 * product, product)


def test_query_heads_that_share_a_key_head_are_as_much_work_as_those_with_one_of_their_own():
    q, grouped = torch.randn(2, 4, 8, 16, requires_grad=True), torch.randn(2, 2, 8, 16)
    own = count_flops(lambda: F.scaled_dot_product_attention(q, q, q))
    shared = count_flops(lambda: F.scaled_dot_product_attention(q, grouped, grouped, enable_gqa=True))
    assert (shared.total, shared.recomputed) == (own.total, own.recomputed)


def test_recomputed_work_is_separated_from_that_of_the_model():
    """A block of two layers: the part before the last saved tensor runs again, and is not work of the model."""
    inner, outer = nn.Linear(16, 16), nn.Linear(16, 16)
    x = torch.randn(8, 16, requires_grad=True)
    product = 2 * 8 * 16 * 16

    def block(x):
        return outer(torch.tanh(inner(x))).square()

    plain = count_flops(lambda: block(x))
    recomputed = count_flops(lambda: checkpoint(block, x, use_reentrant=False))
    assert (plain.total, plain.recomputed) == (6 * product, 0)
    assert (recomputed.total - recomputed.recomputed, recomputed.recomputed) == (6 * product, 2 * product)


class ShardedLinear(torch.autograd.Function):
    """A linear layer as a Function of its own, as DeepSpeed puts one under ZeRO-3."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


@pytest.mark.parametrize("reentrant", [False, True])
def test_work_that_a_function_repeats_is_recomputed_and_that_of_its_backward_is_not(reentrant):
    weight, x = torch.ones(16, 16, requires_grad=True), torch.ones(8, 16, requires_grad=True)

    def block(x):
        return ShardedLinear.apply(x, weight).square()

    counter = count_flops(lambda: checkpoint(block, x, use_reentrant=reentrant))
    product = 2 * 8 * 16 * 16
    assert (counter.total, counter.recomputed) == (4 * product, product)


def test_utilisation_of_a_known_device_is_work_over_time_over_peak():
    """Recomputation counts as work of the hardware and not of the model."""
    quarter = int(DEVICE_PEAKS[H200] / 4)
    result = utilisation(2 * quarter, quarter, [1.0, 1.0, 9.0], H200, {"bfloat16", "float32"})
    assert result == {"mfu": 0.5, "hfu": 0.75, "mfu_reason": None}


@pytest.mark.parametrize(
    ("device", "flops", "recomputed", "dtypes", "reason"),
    [
        ("this cpu", 1, 0, {"bfloat16"}, "no peak is known"),
        ("NVIDIA A100X", 1, 0, {"bfloat16"}, "no peak is known"),
        (H200, 10**16, 0, {"bfloat16"}, "impossible"),
        (H200, 1, 10**16, {"bfloat16"}, "impossible"),
        (H200, 1, 0, {"float32"}, "float32"),
    ],
)
def test_utilisation_is_null_with_a_reason_where_it_would_be_a_guess(device, flops, recomputed, dtypes, reason):
    """An unknown device must not borrow another's peak, and more than all of a peak is an error, not a result."""
    result = utilisation(flops, recomputed, [1.0], device, dtypes)
    assert result["mfu"] is result["hfu"] is None
    assert reason in result["mfu_reason"]
