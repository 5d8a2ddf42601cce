"""Policies that lerobot can build too: pi0 and pi05 with the number of heads that is written in its attention."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchbox.data.loading.trimming import trim
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, build_policy, policy_entry
from benchbox.theory.flops import total_cost, training_cost
from tests.parity.pi import CAMERAS, HEADS, REAL_DIMS
from tests.support.policy_batches import make_batch, wake

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.registry.contracts import AttentionKernel, Batch, Policy

_FLOW_ONLY = {"fast_tokens": 0, "response_tokens": 0, "knowledge_insulation": False}  # what lerobot's pi05 trains
TRIMMED = ", padding left out"  # at the end of the name of a variant
_GATE_SCALE = 0.02  # standard deviation of weights that start at zero


@dataclass(frozen=True)
class Peer:
    """A policy in one size, and the samples of a step."""

    policy: str
    size: str
    batch: int


PEERS = {
    "pi0-tiny": Peer("pi0", "tiny", 4),
    "pi0-small": Peer("pi0", "small", 4),
    "pi05-tiny": Peer("pi05", "tiny", 4),
    "pi05-small": Peer("pi05", "small", 4),
}
GPU_PEERS = PEERS | {
    "pi0-full": Peer("pi0", "full", 8),
    "pi05-full": Peer("pi05", "full", 8),
}


def build_peer(peer: Peer, attention: AttentionKernel) -> Policy:
    """Build the policy in float32, with the same weights at every call, and no gate of adaRMS closed."""
    policy = _build(peer, attention)
    wake(policy, batch_of(policy, peer))
    return policy


def build_rounded_peer(peer: Peer, device: torch.device) -> Policy:
    """Build the policy on a device with weights that bfloat16 represents, and no gate of adaRMS closed.

    The gates are opened by random weights: training as in `build_peer` would take the memory of an optimizer.
    """
    with device:
        policy = _build(peer, "sdpa")
    assert isinstance(policy, torch.nn.Module)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=_GATE_SCALE)
            parameter.copy_(parameter.bfloat16())
    return policy


def load_peer(peer: Peer, attention: AttentionKernel, weights: Path, device: torch.device) -> Policy:
    """Build the policy in float32 on a device, with weights from a folder of published ones."""
    with device:
        policy = _build(peer, attention)
    policy.load_weights(weights)
    return policy


def batch_of(policy: Policy, peer: Peer) -> Batch:
    """Return a batch of whole chunks, whose last camera and last dimensions are missing, with prompts of several lengths."""
    batch = make_batch(policy.batch_spec(), peer.batch)
    batch["image_mask"][:, :, -1] = False
    batch["action_is_pad"][:] = False
    batch["state"][..., REAL_DIMS:] = 0.0
    batch["action"][..., REAL_DIMS:] = 0.0
    return batch


def trimmed_batch(policy: Policy, batch: Batch) -> Batch:
    """Return a batch without the padding that all its samples share, as the loader makes it under `padding: longest`."""
    return trim([batch], policy.batch_spec().trimmable)[0]


def padding_of(policy: Policy, batch: Batch) -> dict[str, float]:
    """Return how many cameras and prompt tokens a batch has, as such and as `*_kept` without common padding.

    `flops` is the share of the FLOPs of a step, by the policy's formula, that this padding takes.
    """
    trimmed = trimmed_batch(policy, batch)
    model_flops = [total_cost(training_cost(policy.work(values))).model for values in (batch, trimmed)]
    return {
        "cameras": batch["images"].shape[2],
        "cameras_kept": trimmed["images"].shape[2],
        "prompt_tokens": batch["prompt_mask"].shape[1],
        "prompt_tokens_kept": trimmed["prompt_mask"].shape[1],
        "flops": 1 - model_flops[1] / model_flops[0],
    }


def _build(peer: Peer, attention: AttentionKernel) -> Policy:
    values = policy_entry(peer.policy).presets[peer.size]
    backbone = values["model"]["backbone"] | {"heads": HEADS}
    preset = values | {"model": values["model"] | {"backbone": backbone}}
    if peer.policy == "pi05":
        preset |= _FLOW_ONLY
    # Imports its module. On the meta device, because that of the caller would allocate it a second time.
    with torch.device("meta"):
        build_policy(peer.policy, "tiny", Axes())
    torch.manual_seed(0)
    policy: Policy = sys.modules[f"{PACKAGE}.{peer.policy}.policy"].build(preset, Axes(cams=CAMERAS, attention=attention))
    return policy
