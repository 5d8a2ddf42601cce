"""Layers with weights for every domain."""

from __future__ import annotations

import pytest
import torch
from benchbox_policies.cosmos_droid.domains import DomainLinear


def test_each_domain_has_a_weight_and_a_bias_of_its_own():
    torch.manual_seed(0)
    layer, x = DomainLinear(3, 5, domains=4), torch.randn(2, 7, 3)
    torch.nn.init.normal_(layer.bias.weight)
    for domain in range(4):
        expected = x @ layer.weight.weight[domain].view(3, 5) + layer.bias.weight[domain]
        torch.testing.assert_close(layer(x, domain), expected)


def test_it_has_gradients_of_zero_in_domains_that_do_not_occur():
    layer = DomainLinear(3, 5, domains=4)
    layer(torch.randn(2, 7, 3), 1).square().sum().backward()
    for table in (layer.weight, layer.bias):
        assert table.weight.grad.any(dim=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("autocast", [False, True])
def test_it_computes_in_the_dtype_of_its_weights_or_of_autocast(autocast):
    layer = DomainLinear(3, 5, domains=2).to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert layer(torch.randn(2, 3), 1).dtype == torch.bfloat16


def test_its_weights_start_by_the_number_of_inputs_and_its_biases_at_zero():
    layer = DomainLinear(64, 200, domains=4)
    assert layer.weight.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    assert not layer.bias.weight.any()
