"""Parameters of a module that its loss does not depend on."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.observer.introspect.names import live_parameters

if TYPE_CHECKING:
    from benchbox.adapters.policy import AdaptedPolicy
    from benchbox.registry.contracts import Batch

_SIZE = 2  # samples of the trial step


def unused_parameters(policy: AdaptedPolicy) -> set[str]:
    """Return the names of the trainable parameters without a gradient in a trial step.

    The step is taken by a copy, because a module may keep what it computes, and changes no random generator. On the meta
    device it computes shapes alone.

    Raises:
        Exception: whatever the module raises; on the meta device, where it reads values.
    """
    replica = deepcopy(policy)
    if any(parameter.is_meta for parameter in replica.parameters()):
        replica.to("meta")  # with the buffers that have values, such as those from numpy
    trainable = {name: parameter for name, parameter in live_parameters(replica) if parameter.requires_grad}
    if not trainable:
        return set()
    device = next(iter(trainable.values())).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        losses: Any = replica({name: tensor.to(device) for name, tensor in _batch(policy).items()})
        gradients = torch.autograd.grad(losses.total, list(trainable.values()), allow_unused=True)
    return {name for name, gradient in zip(trainable, gradients, strict=True) if gradient is None}


def _batch(policy: AdaptedPolicy) -> Batch:
    samples: Any = policy.own_samples(0) or SyntheticSamples(policy.batch_spec(), 0)
    rows = [samples.sample(0, index) for index in range(_SIZE)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
