"""Transformers of diffusers with random weights: `diffusers:dit`, a diffusion transformer that predicts noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import benchbox
from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.registry.contracts import Axes, Batch, Policy

_STEPS = 1000  # of the diffusion
# Parts of a block, not the block: the model calls the embedding in the norm of its first block once more, after the blocks.
_UNITS = ("Attention", "FeedForward")


def build(preset: Mapping[str, Any], axes: Axes, source: str) -> Policy:  # noqa: ARG001 (no cameras)
    """Build a model in float32 on torch's default device.

    Raises:
        ConfigurationError: diffusers is not installed.
    """
    try:
        from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
    except ModuleNotFoundError as error:
        problem = f"needs the package {error.name}, which is not installed"
        raise ConfigurationError(Problem("policy diffusers:dit", problem, f"pip install {error.name}")) from None
    dit = DiTTransformer2DModel(**preset["names"][source])
    latents = _Latents(dit.config.in_channels, dit.config.sample_size, dit.config.num_embeds_ada_norm)
    return benchbox.adapt(
        NoisePrediction(dit), loss=lambda error: error.square().mean(dim=(1, 2, 3)), batch=latents, units=_UNITS
    )


class NoisePrediction(nn.Module):
    """A step of diffusion training: noisy latents in, the error of the predicted noise out (DDPM, arXiv:2006.11239)."""

    signal: Tensor

    def __init__(self, dit: nn.Module) -> None:
        super().__init__()
        self.dit = dit
        self.register_buffer("signal", (1 - torch.linspace(1e-4, 2e-2, _STEPS)).cumprod(0), persistent=False)

    def forward(self, latents: Tensor, noise: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        signal = self.signal[timestep].view(-1, 1, 1, 1)
        noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
        output = self.dit(noisy, timestep=timestep, class_labels=label).sample
        predicted, _ = output.chunk(2, dim=1)  # the other half is a variance, which this loss does not train
        return predicted.float() - noise


class _Latents:
    """Batches of random latents, noise, times and classes."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        self._shape, self._classes = (channels, size, size), classes

    def __call__(self, size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return {
            "latents": torch.randn(size, *self._shape, generator=generator),
            "noise": torch.randn(size, *self._shape, generator=generator),
            "timestep": torch.randint(_STEPS, (size,), generator=generator),
            "label": torch.randint(self._classes, (size,), generator=generator),
        }
