"""Quotients that the compiled step takes from reciprocals are those of a division, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchbox.optim.native import AdamWJob, library
from benchbox.optim.passes import step_adamw
from tests.support.native_pairs import needs_compiler

pytestmark = needs_compiler

SMALLEST = 2.0**-100  # of the gradients whose quotients are exact
DIVISORS = [
    1.0,
    1.0000001,
    1.5,
    3.0,
    1.9999999,
    7131.77,
    65535.98,
    1048575.9,
    2.0**20,
    2.0**20 + 1,
    3e30,
    math.inf,
    math.nan,
    0.7,
]


def step(gradient: Tensor, exp_avg_sq: Tensor, divisor: float, correction: float) -> tuple[Tensor, Tensor]:
    """Return the divided gradients and the updates by them, of a step that leaves the second moments as they are."""
    functions = library()
    assert functions is not None
    master, exp_avg, live = torch.zeros_like(exp_avg_sq), torch.zeros_like(exp_avg_sq), torch.zeros_like(gradient)
    addresses = [tensor.data_ptr() for tensor in (master, exp_avg, exp_avg_sq, gradient, live)]
    coefficients = divisor, 1.0, 1.0, 1.0, 0.0, correction, 0.0, 1.0
    step_adamw(functions, [AdamWJob(gradient.numel(), *addresses, *coefficients)])
    return exp_avg, master


def all_gradients() -> Tensor:
    """Return every bfloat16 number, (65536,)."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("divisor", DIVISORS)
def test_every_gradient_is_divided_as_torch_divides(divisor: float) -> None:
    """Also an infinite one and NaN, where the divisor is not that of finite gradients."""
    gradient = all_gradients()
    divided, _ = step(gradient, torch.ones(gradient.shape), divisor, 1.0)
    exact = (gradient.abs() >= SMALLEST) | (gradient == 0) | gradient.isnan()
    if 1.0 < divisor <= 2.0**20:
        exact &= ~gradient.isinf()
        assert divided[gradient.isinf()].isnan().all(), "no weight stays finite either way"
    assert exact.sum() > 50_000
    assert_same(divided[exact], gradient.float()[exact] / torch.tensor(divisor))


def test_gradients_are_divided_as_torch_divides_by_any_norm() -> None:
    """1000 divisors from 1 to 2^20, each with 4096 gradients."""
    generator = torch.Generator().manual_seed(0)
    for exponent in torch.rand(1000, generator=generator) * 20:
        divisor = float(2.0**exponent)
        gradient = torch.randn(4096, generator=generator).mul(10.0 ** float(exponent - 15)).bfloat16()
        divided, _ = step(gradient, torch.ones(4096), divisor, 1.0)
        assert_same(divided, gradient.float() / torch.tensor(divisor))


def test_tiny_gradients_are_wrong_by_a_unit_in_the_last_place_at_most() -> None:
    gradient = all_gradients()
    gradient = gradient[(gradient.abs() < SMALLEST) & (gradient != 0)]
    gradient = gradient[: len(gradient) // 16 * 16]
    for divisor in (1.1, 3.0, 7131.77, 1048575.9):
        divided, _ = step(gradient, torch.ones(gradient.shape), divisor, 1.0)
        expected = gradient.float() / torch.tensor(divisor)
        distance = divided.abs().view(torch.int32) - expected.abs().view(torch.int32)
        assert int(distance.abs().max()) <= 1
        assert (divided * expected.sign() >= 0).all()


@pytest.mark.parametrize("beta2", [0.95, 0.999, 0.9999999])
@pytest.mark.parametrize("step_count", [1, 2, 7, 1000, 10**6])
def test_roots_are_corrected_as_torch_corrects_them(beta2: float, step_count: int) -> None:
    """Second moments of every size, also zero, subnormal and infinite ones."""
    correction = math.sqrt(1.0 - beta2**step_count)
    bits = torch.randint(0, 0x7F800000, (2**16,), generator=torch.Generator().manual_seed(step_count), dtype=torch.int32)
    exp_avg_sq = bits.view(torch.float32)
    exp_avg_sq[:4] = torch.tensor([0.0, 1e-45, math.inf, 3.4e38])
    gradient = torch.ones(exp_avg_sq.shape, dtype=torch.bfloat16)
    _, master = step(gradient, exp_avg_sq.clone(), 1.0, correction)
    with np.errstate(divide="ignore"):  # torch's own root of a tensor may be wrong by a unit in the last place
        expected = np.float32(-1.0) / (np.sqrt(exp_avg_sq.numpy()) / np.float32(correction))
    assert_same(master, torch.from_numpy(expected))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
