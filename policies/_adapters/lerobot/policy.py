"""Policies of lerobot with random weights: `lerobot:act`, `lerobot:pi0`, `lerobot:smolvla`, ... Nothing is downloaded.

Images are normalised as lerobot does by default: by the mean and deviation of ImageNet where `normalization_mapping` of a
policy has MEAN_STD for them (ACT, diffusion), else they are from 0 to 1 (pi0, pi05, pi0-FAST, SmolVLA). Observations and
actions are of the frames in lerobot's `observation_delta_indices` and `action_delta_indices`, with the first frame of an
episode in the place of those before it.

On the shipped dataset, the first loss of the tiny ACT under ZeRO-3 with bfloat16 weights is 16.190, and 16.285 under DDP. The
cause is DeepSpeed's linear function: it rounds the product of a layer before it adds the bias. With that function put into DDP,
the outputs of all modules are those of ZeRO-3 bit for bit, and without it (`memory_efficient_linear: false`) those of ZeRO-3
are those of DDP. In float32 the losses agree.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

import benchbox
from benchbox.errors import ConfigurationError, Problem, UnsupportedError

from .features import IMAGES, Features, import_lerobot, replaced
from .pi import NAMES, build_pi
from .smolvla import build_smolvla

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, Policy

# Policies without language, and the name of their classes
_WITHOUT_LANGUAGE = {"act": "ACT", "diffusion": "Diffusion"}
# Buffers that a module multiplies with activations, which torch does for one dtype only
_PRODUCTS_WITH_BUFFERS = {"diffusion": ("pos_grid",)}
_REFUSED = {"groot": "its constructor loads published weights from the model hub"}


def build(preset: Mapping[str, Any], axes: Axes, source: str) -> Policy:
    """Build a policy in float32 on torch's default device.

    Raises:
        ConfigurationError: lerobot or a package that the policy needs is not installed.
        UnsupportedError: the policy cannot be built without a model hub, or from this version of lerobot.
    """
    if source in _REFUSED:
        raise UnsupportedError(f"lerobot:{source} cannot be built here: {_REFUSED[source]}")
    try:
        if source in NAMES:
            return build_pi(preset["names"][source], axes, source)
        if source == "smolvla":
            return build_smolvla(preset["names"][source], axes)
        return _build_without_language(preset, axes, source)
    except ImportError as error:  # lerobot checks in constructors for what a policy needs, and says how to install it
        raise ConfigurationError(Problem(f"policy lerobot:{source}", str(error))) from None


def _build_without_language(preset: Mapping[str, Any], axes: Axes, source: str) -> Policy:
    features = Features(cameras=axes.cams, pixels=preset["pixels"], dims=preset["dims"])
    name = _WITHOUT_LANGUAGE[source]
    config = features.config(source, name, pretrained_backbone_weights=None, **preset["names"][source])
    policy_class = getattr(import_lerobot(f"lerobot.policies.{source}.modeling_{source}"), f"{name}Policy")
    by_imagenet = config.normalization_mapping["VISUAL"].name == "MEAN_STD"
    inputs = partial(features.inputs, single=config.observation_delta_indices is None, by_imagenet=by_imagenet)
    if source == "act":
        policy_class = _act_policy(policy_class)
    return benchbox.adapt(
        policy_class(config),
        loss=lambda output: output[0],
        batch=lambda batch: (inputs(batch),),
        spec=features.spec(config),
        act=partial(_act, inputs),
        cast_buffers=_PRODUCTS_WITH_BUFFERS.get(source, ()),
    )


def _act_policy(policy_class: Any) -> Any:
    """Return a subclass of lerobot's ACT whose loss can be evaluated.

    Outside of training there is no latent, whose divergence lerobot 0.4 adds to the loss all the same; 0.6 leaves it out.
    """

    class EvaluatedAct(policy_class):
        def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
            """Return the loss, a scalar, and its parts."""
            if self.training:
                return cast("tuple[Tensor, dict[str, float]]", super().forward(batch))
            with replaced(self.config, use_vae=False):
                return cast("tuple[Tensor, dict[str, float]]", super().forward(batch))

    EvaluatedAct.__name__ = policy_class.__name__
    return EvaluatedAct


def _act(inputs: Callable[[Batch], dict[str, Tensor]], module: Any, batch: Batch) -> Tensor:
    """Return normalised actions (B, N, A) from the current frame on.

    `predict_action_chunk` of lerobot 0.4's diffusion policy ignores the observations of a batch, and reads those that its
    `select_action` has collected.
    """
    observation = inputs(batch)
    if module.name != "diffusion":
        return cast("Tensor", module.predict_action_chunk(observation))
    images = torch.stack([observation[key] for key in module.config.image_features], dim=2)  # (B, T, C, 3, H, W)
    condition = module.diffusion._prepare_global_conditioning(observation | {IMAGES: images})  # noqa: SLF001
    noise = batch["noise"][:, 0]
    # DDPM draws noise in every step: here that of a sample follows from its first noise, and not from who else is in the batch.
    generators = [torch.Generator(noise.device).manual_seed(bits) for bits in noise[:, 0, 0].view(torch.int32).tolist()]
    chunk = module.diffusion.conditional_sample(len(noise), global_cond=condition, generator=generators, noise=noise)
    return cast("Tensor", chunk[:, module.config.n_obs_steps - 1 :])
