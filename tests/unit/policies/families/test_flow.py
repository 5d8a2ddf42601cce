from __future__ import annotations

import math

import scipy.stats
import torch
from benchbox_policies._layers.families.flow import embed_time, flow_loss, interpolate, time_from_uniform
from benchbox_policies._layers.families.losses import combine_losses, sum_valid
from benchbox_policies._layers.nn.norms import AdaRMSNorm
from benchbox_policies._layers.nn.rope import apply_rotary, rotary_cos_sin


def test_times_are_beta_distributed_and_never_zero():
    times = time_from_uniform(torch.linspace(0, 1, 10_001)[:-1])
    assert scipy.stats.kstest((times.numpy() - 0.001) / 0.999, scipy.stats.beta(1.5, 1).cdf).pvalue > 0.99
    assert 0.001 <= times.min() < times.max() <= 1.0


def test_time_1_is_noise_time_0_is_action_and_the_velocity_is_their_difference():
    action, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    x_t, u_t = interpolate(action, noise, torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(x_t[0], noise[0])
    torch.testing.assert_close(x_t[1], action[1])
    torch.testing.assert_close(x_t - torch.tensor([1.0, 0.0])[:, None, None] * u_t, action)


def test_time_embedding_has_periods_from_four_milliseconds_to_four_seconds():
    embedding = embed_time(torch.tensor([0.37]), 6)[0].double()
    periods = [4e-3, math.sqrt(4e-3 * 4.0), 4.0]
    time = float(torch.tensor(0.37))
    expected = [f(2 * math.pi * time / period) for f in (math.sin, math.cos) for period in periods]
    torch.testing.assert_close(embedding, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_padded_steps_and_missing_dimensions_are_neither_summed_nor_counted():
    predicted, target = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    pad = torch.tensor([[False, False, True], [False, False, False]])
    dims = torch.tensor([[True, True, False, False], [True, True, True, True]])
    target[0, 2] = target[0, :, 2:] = math.nan
    total, count = flow_loss(predicted, target, pad, dims)
    assert total.tolist() == count.tolist() == [4.0, 12.0]


def test_the_loss_of_no_tokens_is_exactly_zero_and_so_is_its_gradient():
    token_losses = torch.rand(2, 3, requires_grad=True)
    total, count = sum_valid(token_losses, torch.zeros(2, 3, dtype=torch.bool))
    losses = combine_losses({"response": (total, count)}, per_sample=False)
    losses.total.backward()
    assert losses.total == 0
    assert not token_losses.grad.any()


def test_the_loss_is_the_sum_of_means_over_samples_of_masked_means():
    terms = {
        "a": (torch.tensor([6.0, 0.0]), torch.tensor([3.0, 0.0])),
        "b": (torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0])),
    }
    losses = combine_losses(terms, per_sample=True)
    assert losses.total == (2 + 0) / 2 + (1 + 2.5) / 2
    assert losses.parts == {"a": 2.0, "b": 1.75}, "parts are means over the samples that have them"
    assert losses.counts == {"a": 1.0, "b": 2.0}
    assert losses.per_sample["b"][0].tolist() == [1.0, 5.0]


def test_products_of_rotated_vectors_depend_only_on_the_distance_of_their_positions():
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def product(i: int, j: int) -> torch.Tensor:
        rotated = [
            apply_rotary(x, *rotary_cos_sin(torch.tensor([[position]]), 16, 1e4)) for x, position in ((query, i), (key, j))
        ]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(product(5, 2), product(103, 100), atol=1e-4, rtol=1e-4)
    assert abs(product(5, 2) - product(5, 4)) > 1e-3


def test_a_new_adaptive_norm_only_normalises_and_closes_its_gate():
    norm, x = AdaRMSNorm(8), torch.randn(2, 3, 8)
    normed, gate = norm(x, torch.randn(2, 8))
    torch.testing.assert_close(normed, x / x.square().mean(-1, keepdim=True).sqrt(), rtol=1e-4, atol=1e-4)
    assert not gate.any()
