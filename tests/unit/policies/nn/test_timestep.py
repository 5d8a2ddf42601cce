"""Embedding of diffusion timesteps."""

from __future__ import annotations

import math

import pytest
import torch
from benchbox_policies._layers.nn.timestep import embed_timestep


@pytest.mark.parametrize("timestep", [7, 0.83])
def test_timesteps_are_embedded_as_cosines_and_sines_of_falling_frequency(timestep):
    """VITRA's timesteps are integers, those of cosmos_droid are times in [0, 1]."""
    embedding = embed_timestep(torch.tensor([0.0, timestep]), 256)
    assert embedding.dtype == torch.float32
    assert embedding[0].tolist() == [1.0] * 128 + [0.0] * 128
    angles = [timestep * 10_000 ** (-index / 128) for index in range(128)]
    expected = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
    assert embedding[1].tolist() == pytest.approx(expected, abs=1e-6)
