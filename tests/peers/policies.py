"""Policies that lerobot can build too: pi0 and pi05 with the number of heads that is written in its attention."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, build_policy, policy_entry
from tests.parity.pi import CAMERAS, HEADS, REAL_DIMS
from tests.support.policy_batches import make_batch, wake

if TYPE_CHECKING:
    from benchbox.registry.contracts import AttentionKernel, Batch, Policy

_FLOW_ONLY = {"fast_tokens": 0, "response_tokens": 0, "knowledge_insulation": False}  # what lerobot's pi05 trains


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


def build_peer(peer: Peer, attention: AttentionKernel) -> Policy:
    """Build the policy in float32, with the same weights at every call, and no gate of adaRMS closed."""
    values = policy_entry(peer.policy).presets[peer.size]
    backbone = values["model"]["backbone"] | {"heads": HEADS}
    preset = values | {"model": values["model"] | {"backbone": backbone}}
    if peer.policy == "pi05":
        preset |= _FLOW_ONLY
    build_policy(peer.policy, peer.size, Axes())  # imports its module
    torch.manual_seed(0)
    policy = sys.modules[f"{PACKAGE}.{peer.policy}.policy"].build(preset, Axes(cams=CAMERAS, attention=attention))
    wake(policy, batch_of(policy, peer))
    return policy


def batch_of(policy: Policy, peer: Peer) -> Batch:
    """Return a batch of whole chunks, whose last camera and last dimensions are missing, with prompts of several lengths."""
    batch = make_batch(policy.batch_spec(), peer.batch)
    batch["image_mask"][:, :, -1] = False
    batch["action_is_pad"][:] = False
    batch["state"][..., REAL_DIMS:] = 0.0
    batch["action"][..., REAL_DIMS:] = 0.0
    return batch
