"""Configurations of lerobot's policies, and batches under lerobot's names."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from benchbox.errors import ConfigurationError, Problem, UnsupportedError
from benchbox.registry.contracts import BatchSpec

from ..._layers.families.flow import time_from_uniform

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Batch, NormalisationMode

STATE, IMAGES, ACTION, ACTION_IS_PAD = "observation.state", "observation.images", "action", "action_is_pad"
TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"
# Further entries of batches, which lerobot's policies do not read themselves
IMAGE_MASKS, ACTION_DIM_MASK, NOISE, TIME = "image_masks", "action_dim_mask", "noise", "time"
# Red, green and blue, in lerobot the statistics of the images of every dataset, unless `use_imagenet_stats` is off
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_IMAGE_MODES = dict.fromkeys(("act", "diffusion"), ("IDENTITY", "MEAN_STD"))  # of the other policies only the first
# Settings of lerobot's training by the first letters of their names, and what of a matrix they are here
_OF_THE_MATRIX = {
    "optimizer_": "optim",
    "scheduler_": "optim",
    "gradient_checkpointing": "checkpointing",
    "compile_": "compile",
    "dtype": "recipe",
    "use_amp": "recipe",
}
# By the first letters too: what lerobot does before or beside the modules that are adapted
_UNKNOWN = ("time_sampling_", "use_relative_actions", "adapt_to_pi_aloha", "load_vlm_weights", "use_peft")
_MODES = {"IDENTITY": "identity", "MEAN_STD": "mean_std", "MIN_MAX": "min_max", "QUANTILES": "quantile"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Inputs and outputs of a policy: images of `pixels`^2, state and actions of `dims`."""

    cameras: int
    pixels: int
    dims: int

    @property
    def camera_keys(self) -> list[str]:
        return [f"{IMAGES}.camera{index}" for index in range(self.cameras)]

    def config(self, source: str, name: str, **settings: Any) -> Any:
        """Return the configuration of a policy, an instance of lerobot's class for it.

        Raises:
            UnsupportedError: images, states or actions are to be normalised in a way that this adapter does not know, or a
                setting has no effect here.
        """
        types = import_lerobot("lerobot.configs.types")
        visual = types.PolicyFeature(type=types.FeatureType.VISUAL, shape=(3, self.pixels, self.pixels))
        state = types.PolicyFeature(type=types.FeatureType.STATE, shape=(self.dims,))
        action = types.PolicyFeature(type=types.FeatureType.ACTION, shape=(self.dims,))
        module = import_lerobot(f"lerobot.policies.{source}.configuration_{source}")
        config_class = getattr(module, f"{name}Config")
        _check_settings(config_class, source, settings)
        config = config_class(
            input_features={STATE: state} | dict.fromkeys(self.camera_keys, visual),
            output_features={ACTION: action},
            device="cpu",
            **settings,
        )
        config.device = str(torch.get_default_device())  # "meta" is none that a configuration accepts at first
        _check_modes(config, source)
        return config

    def spec(self, config: Any, **prompt: Any) -> BatchSpec:
        """Return what the data must deliver; state and actions are normalised as the configuration says."""
        modes = config.normalization_mapping
        return BatchSpec(
            cameras=self.cameras,
            image_size=(self.pixels, self.pixels),
            state_dim=self.dims,
            action_dim=self.dims,
            horizon=len(config.action_delta_indices),
            first_action=config.action_delta_indices[0],
            history=config.n_obs_steps,
            state_normalisation=cast("NormalisationMode", _MODES[modes["STATE"].name]),
            action_normalisation=cast("NormalisationMode", _MODES[modes["ACTION"].name]),
            **prompt,
        )

    def inputs(self, batch: Batch, *, single: bool = True, by_imagenet: bool = False) -> dict[str, Tensor]:
        """Return a batch under lerobot's names. The first frame of an episode stands in the place of those before it.

        Args:
            single: only the current observation, whose tensors then have no dimension of time.
            by_imagenet: whether images are normalised by the statistics of ImageNet. Else they are from 0 to 1.
        """
        images, state = batch["images"], batch["state"]
        if single:
            images, state = images[:, -1:], state[:, -1]
        else:
            images = _repeat_first(images, batch["history_mask"])
        images = images.float() / 255  # (B, T, C, 3, H, W)
        if by_imagenet:
            # By channel: a tensor of statistics would be copied to the device in every step.
            for channel, (mean, std) in enumerate(zip(_IMAGENET_MEAN, _IMAGENET_STD, strict=True)):
                images.select(-3, channel).sub_(mean).div_(std)
        views = {key: images[:, 0, index] if single else images[:, :, index] for index, key in enumerate(self.camera_keys)}
        return {STATE: state} | views | {key: batch[key] for key in (ACTION, ACTION_IS_PAD) if key in batch}

    def language_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the current observation with the prompt, and a mask (B,) of every camera: whether its image is there."""
        prompt = {TOKENS: batch["prompt_tokens"], TOKEN_MASK: batch["prompt_mask"]}
        return self.inputs(batch) | prompt | {IMAGE_MASKS: [batch["image_mask"][:, -1, index] for index in range(self.cameras)]}

    def flow_inputs(self, batch: Batch) -> tuple[dict[str, Any]]:
        """Return a batch for a flow-matching policy: with noise (B, N, A), time (B,), and the dimensions that the data has."""
        time = time_from_uniform(batch["uniform"][:, 0])
        draws = {NOISE: batch["noise"][:, 0], TIME: time, ACTION_DIM_MASK: batch[ACTION_DIM_MASK]}
        return (self.language_inputs(batch) | draws,)

    def act_by_flow(self, policy: Any, batch: Batch) -> Tensor:
        """Denoise normalised actions (B, N, A) from the first noise of the batch."""
        actions: Tensor = policy.predict_action_chunk(self.language_inputs(batch), noise=batch["noise"][:, 0])
        return actions


def _check_settings(config_class: Any, source: str, settings: Mapping[str, Any]) -> None:
    """Refuse what lerobot would do by a setting and this adapter does not; defaults are no request."""
    defaults = {field.name: field.default for field in fields(config_class)}
    for name, value in settings.items():
        if (tuple(value) if isinstance(value, list) else value) == defaults.get(name):
            continue
        if name.startswith(_UNKNOWN):
            raise UnsupportedError(f"lerobot:{source} cannot be built here: this adapter does not know its {name}")
        if owner := next((owner for prefix, owner in _OF_THE_MATRIX.items() if name.startswith(prefix)), None):
            raise UnsupportedError(
                f"lerobot:{source} cannot be built here: its {name} has no effect, `{owner}` of the matrix has"
            )


def _check_modes(config: Any, source: str) -> None:
    image_modes = _IMAGE_MODES.get(source, ("IDENTITY",))
    modes_of_features = {"VISUAL": image_modes, "STATE": tuple(_MODES), "ACTION": tuple(_MODES)}
    for feature, modes in modes_of_features.items():
        if (mode := config.normalization_mapping[feature].name) not in modes:
            raise UnsupportedError(
                f"lerobot:{source} cannot be built here: its normalization_mapping has {mode} for {feature}, which is "
                f"normalised by {' or '.join(modes)}"
            )


def _repeat_first(images: Tensor, within_episode: Tensor) -> Tensor:
    """Replace the images (B, T, ...) of frames before an episode by those of its first frame, as (B, T) says."""
    samples, steps = (torch.arange(size, device=images.device) for size in within_episode.shape)
    first = within_episode.int().argmax(dim=1, keepdim=True)
    return images[samples[:, None], torch.maximum(steps, first)]


def masks_of_images(batch: dict[str, Any], masks: list[Tensor]) -> list[Tensor]:
    """Return the masks (B,) of the batch for its cameras, and lerobot's `masks` for the empty ones that follow."""
    return [*batch[IMAGE_MASKS], *masks[len(batch[IMAGE_MASKS]) :]]


def mean_of_elements(elements: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the masked elements (B, N, A) of every sample (B,). The mask is broadcast to them."""
    mask = mask.expand_as(elements)
    return (elements * mask).sum(dim=(1, 2)) / mask.sum(dim=(1, 2)).clamp_min(1)


def import_lerobot(module: str) -> Any:
    """Import a module of lerobot.

    Raises:
        ConfigurationError: lerobot, or a package that the module needs, is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        problem = Problem("policy lerobot", f"needs the package {package}, which is not installed", f"pip install {package}")
        raise ConfigurationError(problem) from None


@contextmanager
def replaced(module: Any, **substitutes: Any) -> Iterator[None]:
    """Replace names of a module within the with block."""
    originals = {name: getattr(module, name) for name in substitutes}
    vars(module).update(substitutes)
    try:
        yield
    finally:
        vars(module).update(originals)
