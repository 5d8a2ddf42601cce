"""The cross-entropy of an output head is torch's, and never has the logits of all tokens in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from benchbox_policies._layers.nn import cross_entropy
from benchbox_policies._layers.nn.cross_entropy import head_cross_entropy

from benchbox.measure.memory import TensorStorageTracker

B, L, W, V = 3, 7, 16, 40


@pytest.fixture(params=[1, 4, B * L], ids="{} tokens a chunk".format)
def chunked(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", request.param * V)


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(B, L, W).to(dtype).requires_grad_()
    weight = torch.randn(V, W).to(dtype).requires_grad_()
    return x, weight, torch.randint(0, V, (B, L)), torch.rand(B, L)


def reference(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float().transpose(1, 2), targets, reduction="none")


def gradients(function, x, weight, targets, scale):
    losses = function(x, weight, targets)
    return losses.detach(), torch.autograd.grad((losses * scale).sum(), (x, weight))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_losses_and_gradients_are_those_of_all_logits_at_once(chunked, dtype, tolerance):
    """In bfloat16 the gradient of the weight is rounded once per chunk."""
    *tensors, scale = inputs(dtype)
    losses, found = gradients(head_cross_entropy, *tensors, scale)
    expected_losses, expected = gradients(reference, *tensors, scale)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert losses.dtype == torch.float32
    for gradient, wanted in zip(found, expected, strict=True):
        assert gradient.dtype == dtype
        assert (gradient - wanted).norm() <= tolerance * wanted.norm()


def test_autocast_chooses_the_dtype_of_the_product_and_gradients_stay_in_float32(chunked):
    *tensors, scale = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, found = gradients(head_cross_entropy, *tensors, scale)
        expected_losses, expected = gradients(reference, *tensors, scale)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert (losses - gradients(reference, *tensors, scale)[0]).abs().max() > 1e-4, "in float32 they are others"
    for gradient, wanted in zip(found, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen):
    x, weight, targets, scale = inputs()
    _, (x_gradient, weight_gradient) = gradients(head_cross_entropy, x, weight, targets, scale)
    {"x": x, "weight": weight}[frozen].requires_grad_(False)
    (head_cross_entropy(x, weight, targets) * scale).sum().backward()
    assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")
    for gradient, wanted in ((x.grad, x_gradient), (weight.grad, weight_gradient)):
        assert gradient is None or torch.equal(gradient, wanted)


def test_no_more_than_some_chunks_of_logits_exist_at_a_time(monkeypatch):
    """Forward and backward of all logits at once need three times their bytes in float32, one of them between the two."""
    tokens, vocabulary, rows = 256, 4096, 16
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", rows * vocabulary)
    x, weight = torch.randn(1, tokens, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(0, vocabulary, (1, tokens))
    peaks = {}
    for function in (head_cross_entropy, reference):
        with TensorStorageTracker() as memory:
            function(x, weight, targets).sum().backward()
        peaks[function] = memory.peak_bytes
        x.grad = weight.grad = None
    logits_bytes = 4 * tokens * vocabulary
    assert peaks[reference] > 2 * logits_bytes
    assert peaks[head_cross_entropy] < logits_bytes / 2
