"""Parameters of a module that its loss does not depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchbox.data.synthetic import SyntheticSamples

if TYPE_CHECKING:
    from benchbox.adapters.policy import AdaptedPolicy
    from benchbox.registry.contracts import Batch

_SIZE = 2  # samples of the trial step


def unused_parameters(policy: AdaptedPolicy) -> set[nn.Parameter]:
    """Return the trainable parameters without a gradient in a trial step, which changes nothing and draws no random numbers.

    The step runs on meta tensors, which have no values; a module that reads values and has some runs it on them.

    Raises:
        Exception: whatever the module raises in the trial step.
    """
    batch = _batch(policy)
    parameters = [parameter for _, parameter in nn.Module.named_parameters(policy) if parameter.requires_grad]
    with torch.random.fork_rng(devices=[]):
        try:
            return _without_gradient(policy, batch, torch.device("meta"))
        except Exception:
            if any(tensor.is_meta for tensor in (*policy.parameters(), *policy.buffers())):
                raise
            return _without_gradient(policy, batch, parameters[0].device)


def _without_gradient(policy: AdaptedPolicy, batch: Batch, device: torch.device) -> set[nn.Parameter]:
    def tensor_on_device(tensor: Tensor) -> Tensor:
        moved = torch.empty_like(tensor, device=device) if device.type == "meta" else tensor.detach().clone()
        return moved.requires_grad_(tensor.requires_grad)

    tensors = {name: tensor_on_device(tensor) for name, tensor in (*policy.named_parameters(), *policy.named_buffers())}
    trainable = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    losses: Any = functional_call(policy, tensors, ({name: tensor.to(device) for name, tensor in batch.items()},))
    gradients = torch.autograd.grad(losses.total, [tensors[name] for name in trainable], allow_unused=True)
    return {parameter for parameter, gradient in zip(trainable.values(), gradients, strict=True) if gradient is None}


def _batch(policy: AdaptedPolicy) -> Batch:
    samples: Any = policy.own_samples(0) or SyntheticSamples(policy.batch_spec(), 0)
    rows = [samples.sample(0, index) for index in range(_SIZE)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
