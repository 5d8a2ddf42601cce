"""VITRA's FSDP strategy: weight decay is zero everywhere, because parameters are told apart after wrapping.

Vectors are not to decay, and `ndim <= 1` says which those are, until FSDP has made a flat piece of every parameter.
Repair: decide by name and shape before wrapping, and bind the names afterwards.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP406",)
RANKS = 2


def decaying(policy: nn.Module) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.ndim > 1 and not name.endswith(".bias")}


def main(repaired: bool) -> None:
    join_ranks()
    policy = Policy()
    names = decaying(policy)
    strategy = ShardingStrategy.SHARD_GRAD_OP
    policy = FullyShardedDataParallel(policy, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu"))
    if not repaired:
        names = decaying(policy)
    parameters = {name.removeprefix("_fsdp_wrapped_module."): parameter for name, parameter in policy.named_parameters()}
    decay = [parameter for name, parameter in parameters.items() if name in names]
    others = [parameter for name, parameter in parameters.items() if name not in names]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        policy.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
