"""pi0 and pi05 in sizes that lerobot can build too, and a batch for both."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from benchbox_policies._layers.families.flow import time_from_uniform
from benchbox_policies._layers.weights.published_names import parameter_names

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, build_policy, policy_entry
from tests.support.policy_batches import make_batch, wake

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from benchbox.registry.contracts import Batch, Policy

PRESETS = {"pi0": "tiny", "pi05": "tiny_flow"}
CAMERAS = 3  # of which the last is missing
REAL_DIMS = 7  # dimensions of state and action that the data has
HEADS = 8  # lerobot has this number written in its attention


def build_pi(name: str) -> Policy:
    """Build a policy whose parameters have been trained for two steps, so that no gate of adaRMS is closed."""
    torch.manual_seed(0)
    build_policy(name, PRESETS[name], Axes())
    policy = sys.modules[f"{PACKAGE}.{name}.policy"].build(preset(name), Axes(cams=CAMERAS))
    wake(policy, pi_batch(policy))
    return policy


def preset(name: str) -> dict[str, Any]:
    """Return the tiny preset, with the number of heads that lerobot requires."""
    values = policy_entry(name).presets[PRESETS[name]]
    backbone = values["model"]["backbone"] | {"heads": HEADS}
    return values | {"model": values["model"] | {"backbone": backbone}}


def pi_batch(policy: Policy) -> Batch:
    """Return a batch of whole chunks, whose last camera and last dimensions are missing, with prompts of several lengths."""
    batch = make_batch(policy.batch_spec(), 3)
    batch["image_mask"][:, :, -1] = False
    batch["action_is_pad"][:] = False
    batch["state"][..., REAL_DIMS:] = 0.0
    batch["action"][..., REAL_DIMS:] = 0.0
    return batch


def lerobot_batch(
    batch: Batch, *, cameras: Sequence[int] = range(CAMERAS - 1), state_dims: int = REAL_DIMS, action_dims: int = REAL_DIMS
) -> dict[str, Tensor]:
    """Return a batch under lerobot's names, without what is missing in it."""
    images = {f"observation.images.{i}": batch["images"][:, 0, i].float() / 255 for i in cameras}
    return images | {
        "observation.state": batch["state"][:, -1, :state_dims].contiguous(),
        "observation.language.tokens": batch["prompt_tokens"],
        "observation.language.attention_mask": batch["prompt_mask"],
        "action": batch["action"][..., :action_dims].contiguous(),
        "noise": batch["noise"][:, 0].contiguous(),
        "time": time_from_uniform(batch["uniform"][:, 0]),
    }


def lerobot_sizes(name: str, policy: Policy, *, state_dims: int = REAL_DIMS, action_dims: int = REAL_DIMS) -> dict[str, Any]:
    """Return the sizes of a policy under lerobot's names."""
    config = policy.config
    vision, backbone, expert = config.model.vision, config.model.backbone, config.model.expert
    shared = {
        "depth": backbone.depth,
        "num_heads": backbone.heads,
        "num_kv_heads": backbone.kv_heads,
        "head_dim": backbone.head_dim,
    }
    return {
        "policy": name,
        "backbone": shared | {"width": backbone.width, "mlp_dim": backbone.mlp},
        "expert": shared | {"width": expert.width, "mlp_dim": expert.mlp},
        "vision": {
            "hidden_size": vision.width,
            "num_hidden_layers": vision.depth,
            "num_attention_heads": vision.heads,
            "intermediate_size": vision.mlp,
            "patch_size": vision.patch,
            "projection_dim": backbone.width,
        },
        "vocabulary": config.model.vocabulary,
        "image_size": [vision.image, vision.image],
        "cameras": [f"observation.images.{i}" for i in range(policy.cameras)],
        "horizon": config.horizon,
        "denoising_steps": config.denoising_steps,
        "state_dim": state_dims,
        "max_state_dim": config.state_dim,
        "action_dim": action_dims,
        "max_action_dim": config.action_dim,
    }


def lerobot_gradients(outputs: Mapping[str, Tensor], without_gradient: Sequence[str]) -> dict[str, Tensor]:
    """Return the gradients among the outputs of `scripts/pi.py`, under our names of the parameters."""
    prefix = "gradient."
    gradients = {name.removeprefix(prefix): tensor for name, tensor in outputs.items() if name.startswith(prefix)}
    names = parameter_names([*gradients, *without_gradient])
    return {names[name]: gradient for name, gradient in gradients.items()}


def predicting_padding(batch: Batch) -> Batch:
    """Return a batch whose padded dimensions are predicted while acting, as lerobot does although it does not train them."""
    return {**batch, "action_dim_mask": torch.ones_like(batch["action_dim_mask"])}


def network_pixels(images: Tensor) -> Tensor:
    """Return the current frames of images (B, T, C, 3, H, W) uint8 as vision towers get them: (B, C, 3, H, W) from -1 to 1."""
    return images[:, -1].float() / 127.5 - 1.0
