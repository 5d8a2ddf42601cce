"""Batches as the contract describes them, small, with padding of every kind in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import default_collate

from benchbox.data.synthetic import SyntheticSamples
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec, Policy


def build(size: str = "tiny", **axes: object) -> Policy:
    """pi05, the same weights at every call."""
    torch.manual_seed(0)
    return build_policy("pi05", size, Axes(**axes))


def make_batch(spec: BatchSpec, size: int, seed: int = 0) -> Batch:
    """Synthetic samples, each with its own lengths of prompt, response, FAST tokens and chunk, and with 7 action dimensions."""
    samples = SyntheticSamples(spec, seed)
    batch = default_collate([samples.sample(0, index) for index in range(size)])
    lengths = torch.Generator().manual_seed(seed)
    for name in ("prompt", "response", "fast"):
        mask = batch[f"{name}_mask"]
        keep = torch.randint(1, mask.shape[1] + 1, (size, 1), generator=lengths)
        batch[f"{name}_mask"] = torch.arange(mask.shape[1]) < keep
    batch["action_is_pad"] = torch.arange(spec.horizon) >= torch.randint(1, spec.horizon + 1, (size, 1), generator=lengths)
    batch["action_dim_mask"] = (torch.arange(spec.action_dim) < 7).expand(size, -1)
    return batch


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


def wake(policy: Policy, batch: Batch) -> None:
    """Two optimizer steps: adaRMS starts with closed gates, behind which nothing has an effect or a gradient."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(2):
        policy(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()


def awake(**axes: object) -> tuple[Policy, Batch]:
    """A policy two steps from birth, without gradients, and a batch of 4 for it."""
    policy = build(**axes)
    batch = make_batch(policy.batch_spec(), 4)
    wake(policy, batch)
    return policy, batch
