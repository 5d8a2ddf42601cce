"""The step of diffusion training around a transformer of diffusers, which a linear one stands in for."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

adapter = import_module("benchbox_policies._adapters.diffusers.policy")


class Transformer(torch.nn.Module):
    """Returns twice its noisy latents, and a variance of 7 after them."""

    def __init__(self):
        super().__init__()
        self.arguments = None

    def forward(self, latents, timestep, class_labels):
        self.arguments = latents, timestep, class_labels
        return SimpleNamespace(sample=torch.cat((2 * latents, torch.full_like(latents, 7.0)), dim=1))


def test_latents_are_noised_by_the_linear_schedule_of_ddpm_and_the_error_is_that_of_the_noise():
    """Betas rise from 1e-4 to 0.02 in 1000 steps (arXiv:2006.11239, section 4); the predicted variance is not read."""
    transformer = Transformer()
    batch = adapter._Latents(4, 8, 10)(3, seed=0)
    batch["timestep"] = torch.tensor([0, 1, 999])
    error = adapter.NoisePrediction(transformer)(**batch)
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    remaining = torch.tensor([(1 - betas[: step + 1]).prod() for step in (0, 1, 999)])[:, None, None, None]
    noisy = (remaining**0.5 * batch["latents"] + (1 - remaining) ** 0.5 * batch["noise"]).float()
    torch.testing.assert_close(transformer.arguments[0], noisy, rtol=1e-4, atol=1e-4)
    assert transformer.arguments[1:] == (batch["timestep"], batch["label"])
    torch.testing.assert_close(error, 2 * noisy - batch["noise"], rtol=1e-4, atol=1e-4)


def test_batches_have_every_time_and_class_and_depend_on_the_seed_alone():
    latents = adapter._Latents(4, 8, 10)
    batch, again, other = latents(4000, seed=1), latents(4000, seed=1), latents(4000, seed=2)
    assert {name: tuple(values.shape[1:]) for name, values in batch.items()} == {
        "latents": (4, 8, 8),
        "noise": (4, 8, 8),
        "timestep": (),
        "label": (),
    }
    assert set(batch["label"].tolist()) == set(range(10))
    assert batch["timestep"].min() < 10
    assert 990 <= batch["timestep"].max() < 1000
    for name in ("latents", "noise"):
        assert batch[name].std().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(batch["latents"], batch["noise"])
    assert all(torch.equal(batch[name], again[name]) and not torch.equal(batch[name], other[name]) for name in batch)
