"""pi0 and pi05 in sizes that lerobot can build too, and a batch for both."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, build_policy, policy_entry
from tests.support.policy_batches import make_batch, wake

if TYPE_CHECKING:
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
