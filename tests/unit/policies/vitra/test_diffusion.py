"""Noise schedule, DDIM sampling and guidance."""

from __future__ import annotations

import math

import pytest
import torch
from benchbox_policies.vitra.diffusion import add_noise, alpha_bars, ddim, timestep_from_uniform

STEPS = 100


def schedule(steps: int = STEPS) -> torch.Tensor:
    return alpha_bars(steps, torch.device("cpu"))


def test_alpha_bar_falls_as_a_squared_cosine():
    """Equation 17 of arXiv:2102.09672, in Python arithmetic; only the last step is clipped, to a beta of 0.999."""

    def cosine(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    expected = [cosine(step / STEPS) / cosine(0) for step in range(1, STEPS)]
    expected.append(expected[-1] * (1 - 0.999))
    assert schedule().dtype == torch.float64
    assert schedule().tolist() == pytest.approx(expected, rel=1e-9)


def test_all_timesteps_are_equally_likely_and_none_is_out_of_range():
    steps = timestep_from_uniform(torch.arange(10_000) / 10_000, STEPS)
    assert steps.bincount(minlength=STEPS).tolist() == pytest.approx([100] * STEPS, abs=1)
    largest = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    assert timestep_from_uniform(largest, STEPS).item() == STEPS - 1


def test_each_chunk_is_noised_to_its_timestep():
    clean, noise = torch.tensor([[[[3.0]]]]), torch.full((1, 3, 1, 1), -1.0)
    step = torch.tensor([[0, 50, 99]])
    noisy = add_noise(clean, noise, step, STEPS)
    alpha_bar = schedule()[step[0]]
    assert noisy.dtype == torch.float32
    assert noisy.flatten().tolist() == pytest.approx((alpha_bar.sqrt() * 3 - (1 - alpha_bar).sqrt()).tolist(), rel=1e-6)


@pytest.mark.parametrize("inference_steps", [1, 7, 10, 100])
def test_an_exact_noise_prediction_leads_back_to_the_data(inference_steps):
    data, noise = torch.randn(2, 16, 5), torch.randn(2, 16, 5)

    def oracle(x_t: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        alpha_bar = schedule()[timestep].float()
        return (x_t - alpha_bar.sqrt() * data) / (1 - alpha_bar).sqrt()

    torch.testing.assert_close(ddim(oracle, noise, STEPS, inference_steps), data, atol=1e-4, rtol=0)


def test_ten_of_a_hundred_timesteps_are_visited_from_90_to_0():
    visited = []

    def epsilon(x_t: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        visited.append(timestep.item())
        return torch.zeros_like(x_t)

    ddim(epsilon, torch.randn(1, 2, 3), STEPS, 10)
    assert visited == [90, 80, 70, 60, 50, 40, 30, 20, 10, 0]


def test_a_wrong_prediction_enters_the_next_step_as_in_the_paper():
    """Equation 12 of arXiv:2010.02502 with a sigma of 0, in two steps, by hand."""
    predictions = {50: 0.7, 0: -0.2}
    late, early = schedule()[50].item(), schedule()[0].item()
    clean = (1.5 - math.sqrt(1 - late) * 0.7) / math.sqrt(late)
    between = math.sqrt(early) * clean + math.sqrt(1 - early) * 0.7
    expected = (between - math.sqrt(1 - early) * -0.2) / math.sqrt(early)
    x_0 = ddim(lambda x_t, timestep: torch.full_like(x_t, predictions[timestep.item()]), torch.full((1, 1, 1), 1.5), STEPS, 2)
    assert x_0.item() == pytest.approx(expected, rel=1e-5)
