"""Policies of lerobot with random weights: `lerobot:act`, `lerobot:diffusion`. Nothing is downloaded.

The other policies of lerobot 0.4 cannot be built without a model hub or with a transformers of PyPI; the error says why.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import benchbox
from benchbox.errors import ConfigurationError, Problem, UnsupportedError
from benchbox.registry.contracts import BatchSpec
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, NormalisationMode, Policy

# Policy -> (name of its classes, normalisation of state and action, which its configuration declares)
_POLICIES: dict[str, tuple[str, NormalisationMode]] = {"act": ("ACT", "mean_std"), "diffusion": ("Diffusion", "min_max")}
# Buffers that a module multiplies with activations, which torch does for one dtype only
_PRODUCTS_WITH_BUFFERS = {"diffusion": ("pos_grid",)}
_NEEDS_PROCESSOR = "its constructor loads a processor from the model hub"
_NEEDS_WEIGHTS = "its constructor loads published weights from the model hub"
_NEEDS_FORK = "its constructor asks for lerobot's patched transformers, which is not on PyPI"
_REFUSED = {
    "smolvla": _NEEDS_PROCESSOR,
    "pi0": _NEEDS_FORK,
    "pi05": _NEEDS_FORK,
    "pi0_fast": _NEEDS_FORK,
    "groot": _NEEDS_WEIGHTS,
}


def build(preset: Mapping[str, Any], axes: Axes, source: str) -> Policy:
    """Build a policy in float32 on torch's default device.

    Raises:
        ConfigurationError: lerobot is not installed, or has no such policy.
        UnsupportedError: the policy cannot be built without a model hub.
    """
    if source in _REFUSED:
        raise UnsupportedError(f"lerobot:{source} cannot be built here: {_REFUSED[source]}")
    if source not in _POLICIES:
        raise ConfigurationError(
            Problem(f"policy lerobot:{source}", "is not one that this adapter builds", did_you_mean(source, _POLICIES))
        )
    name, normalisation = _POLICIES[source]
    types = _import("lerobot.configs.types")
    settings = preset[source]
    pixels, dims = preset["pixels"], preset["dims"]
    cameras = [f"observation.images.camera{index}" for index in range(axes.cams)]
    visual = {key: types.PolicyFeature(type=types.FeatureType.VISUAL, shape=(3, pixels, pixels)) for key in cameras}
    state = types.PolicyFeature(type=types.FeatureType.STATE, shape=(dims,))
    action = types.PolicyFeature(type=types.FeatureType.ACTION, shape=(dims,))
    config_class = getattr(_import(f"lerobot.policies.{source}.configuration_{source}"), f"{name}Config")
    config = config_class(
        input_features={"observation.state": state} | visual,
        output_features={"action": action},
        pretrained_backbone_weights=None,
        device="cpu",
        **settings,
    )
    policy_class = getattr(_import(f"lerobot.policies.{source}.modeling_{source}"), f"{name}Policy")
    spec = BatchSpec(
        cameras=axes.cams,
        image_size=(pixels, pixels),
        state_dim=dims,
        action_dim=dims,
        horizon=len(config.action_delta_indices),
        history=config.n_obs_steps,
        prompt_tokens=32,
        text_vocab=259,
        state_normalisation=normalisation,
        action_normalisation=normalisation,
    )
    inputs = partial(_inputs, cameras, single=config.n_obs_steps == 1)
    return benchbox.adapt(
        policy_class(config),
        loss=lambda output: output[0],
        batch=inputs,
        spec=spec,
        act=_actor(inputs),
        cast_buffers=_PRODUCTS_WITH_BUFFERS.get(source, ()),
    )


def _inputs(cameras: list[str], batch: Batch, *, single: bool) -> tuple[dict[str, Tensor]]:
    """Return a batch of lerobot: with one observation, its tensors have no dimension of time."""
    images = batch["images"].float() / 255  # (B, T, C, 3, H, W)
    state = batch["state"]
    if single:
        images, state = images[:, -1:], state[:, -1]
    views = {key: images[:, 0, index] if single else images[:, :, index] for index, key in enumerate(cameras)}
    targets = {key: batch[key] for key in ("action", "action_is_pad") if key in batch}
    return ({"observation.state": state} | views | targets,)


def _actor(inputs: Callable[[Batch], tuple[dict[str, Tensor]]]) -> Callable[[Any, Batch], Tensor]:
    return lambda module, batch: module.predict_action_chunk(*inputs(batch))


def _import(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = {"lerobot": "lerobot", "diffusers": "diffusers"}.get(str(error.name).split(".")[0], error.name)
        problem = Problem("policy lerobot", f"needs the package {package}, which is not installed", f"pip install {package}")
        raise ConfigurationError(problem) from None
