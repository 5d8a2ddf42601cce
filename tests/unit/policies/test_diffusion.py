"""Noise added in steps, and taken away again."""

from __future__ import annotations

import math

import pytest
import torch
from benchbox_policies.vitra.diffusion import add_noise, alpha_bars, ddim, guided, step_from_uniform

STEPS = 100


def left(steps: int = STEPS) -> torch.Tensor:
    return alpha_bars(steps, torch.device("cpu"))


def test_what_is_left_after_each_step_falls_as_a_squared_cosine():
    """Equation 17 of arXiv:2102.09672, in python's arithmetic; only the last step is held back, at 0.999 of what was left."""

    def cosine(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    expected = [cosine(step / STEPS) / cosine(0) for step in range(1, STEPS)]
    expected.append(expected[-1] * (1 - 0.999))
    assert left().dtype == torch.float64
    assert left().tolist() == pytest.approx(expected, rel=1e-9)


def test_every_step_is_as_likely_as_any_other_and_none_is_out_of_range():
    steps = step_from_uniform(torch.arange(10_000) / 10_000, STEPS)
    assert steps.bincount(minlength=STEPS).tolist() == pytest.approx([100] * STEPS, abs=1)
    largest = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    assert step_from_uniform(largest, STEPS).item() == STEPS - 1


def test_noise_takes_the_place_of_what_is_lost_chunk_by_chunk():
    clean, noise = torch.tensor([[[[3.0]]]]), torch.full((1, 3, 1, 1), -1.0)
    step = torch.tensor([[0, 50, 99]])
    noisy = add_noise(clean, noise, step, STEPS)
    share = left()[step[0]]
    assert noisy.dtype == torch.float32
    assert noisy.flatten().tolist() == pytest.approx((share.sqrt() * 3 - (1 - share).sqrt()).tolist(), rel=1e-6)


@pytest.mark.parametrize("taken", [1, 7, 10, 100])
def test_a_network_that_knows_the_noise_leads_back_to_the_data(taken):
    data, noise = torch.randn(2, 16, 5), torch.randn(2, 16, 5)

    def oracle(point: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        share = left()[step].float()
        return (point - share.sqrt() * data) / (1 - share).sqrt()

    torch.testing.assert_close(ddim(oracle, noise, STEPS, taken), data, atol=1e-4, rtol=0)


def test_ten_of_a_hundred_steps_are_visited_from_the_ninetieth_down():
    visited = []

    def epsilon(point: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        visited.append(step.item())
        return torch.zeros_like(point)

    ddim(epsilon, torch.randn(1, 2, 3), STEPS, 10)
    assert visited == [90, 80, 70, 60, 50, 40, 30, 20, 10, 0]


def test_a_wrong_prediction_is_carried_to_the_next_step_as_the_paper_says():
    """Equation 12 of arXiv:2010.02502 with a sigma of 0, in two steps, by hand."""
    predictions = {50: 0.7, 0: -0.2}
    late, early = left()[50].item(), left()[0].item()
    clean = (1.5 - math.sqrt(1 - late) * 0.7) / math.sqrt(late)
    between = math.sqrt(early) * clean + math.sqrt(1 - early) * 0.7
    expected = (between - math.sqrt(1 - early) * -0.2) / math.sqrt(early)
    done = ddim(lambda point, step: torch.full_like(point, predictions[step.item()]), torch.full((1, 1, 1), 1.5), STEPS, 2)
    assert done.item() == pytest.approx(expected, rel=1e-5)


def test_guidance_leads_away_from_what_is_predicted_without_the_condition():
    conditional, unconditional = torch.randn(2, 3, 4)
    assert torch.equal(guided(conditional, unconditional, 1.0), conditional)
    torch.testing.assert_close(guided(conditional, unconditional, 0.0), unconditional)
    torch.testing.assert_close(guided(conditional, unconditional, 5.0), unconditional + 5 * (conditional - unconditional))
