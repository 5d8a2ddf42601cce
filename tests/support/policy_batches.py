"""Small policies, and batches for them with padding of every kind."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy, find_policies

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec, Policy

POLICIES = sorted(find_policies())


def build(name: str = "pi05", size: str = "tiny", **axes: object) -> Policy:
    """Build a policy with the same weights at every call."""
    torch.manual_seed(0)
    return build_policy(name, size, Axes(**axes))


class _SkippingInitialisation(TorchDispatchMode):
    """Leaves out the random initialisation of meta tensors, which does nothing in 0.5 ms a tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            return args[0]
        return func(*args, **(kwargs or {}))


@cache
def build_on_meta(name: str, size: str, **axes: object) -> Policy:
    """Return a policy on the meta device, which has shapes and no values. Tests share it: they must not change it."""
    with torch.device("meta"), _SkippingInitialisation():
        return build(name, size, **axes)


def make_batch(spec: BatchSpec, size: int, seed: int = 0) -> Batch:
    """Collate synthetic samples with random lengths of texts and chunk, and with 7 action dimensions."""
    samples = SyntheticSamples(spec, seed)
    batch = default_collate([samples.sample(0, index) for index in range(size)])
    lengths = torch.Generator().manual_seed(seed)
    for name in ("prompt", "response", "memory", "metadata", "fast"):
        if f"{name}_mask" in batch:
            mask = batch[f"{name}_mask"]
            keep = torch.randint(1, mask.shape[-1] + 1, (size, *[1] * (mask.ndim - 1)), generator=lengths)
            batch[f"{name}_mask"] = (torch.arange(mask.shape[-1]) < keep).expand_as(mask).clone()
    batch["action_is_pad"] = torch.arange(spec.horizon) >= torch.randint(1, spec.horizon + 1, (size, 1), generator=lengths)
    batch["action_dim_mask"] = (torch.arange(spec.action_dim) < 7).expand(size, -1)
    return batch


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the gradient of every trainable parameter."""
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.requires_grad}


def wake(policy: Policy, batch: Batch) -> None:
    """Train two steps, because the gates of adaRMS start at 0, behind which parameters have no effect and no gradient."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(2):
        policy(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()


def awake(name: str = "pi05", **axes: object) -> tuple[Policy, Batch]:
    """Return a policy after two training steps, without gradients, and a batch of 4."""
    policy = build(name, **axes)
    batch = make_batch(policy.batch_spec(), 4)
    wake(policy, batch)
    return policy, batch
