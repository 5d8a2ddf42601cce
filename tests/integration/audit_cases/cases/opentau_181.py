"""OpenTau#181: the same pi05 scored 94% when trained with DeepSpeed and 0% with DDP.

The trainer casts the policy to bfloat16 and builds AdamW on what the cast left. ZeRO-2 swaps that optimizer for one with
float32 partitions; DDP swaps nothing, so weights and moments are bfloat16 and small updates never arrive.
Repair: step float32 masters, copied before the cast.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from benchbox.optim import MasterWeightOptimizer
from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP101", "BXP102", "BXP103", "BXP106", "BXP201")
RANKS = 2


def main(repaired: bool) -> None:
    join_ranks()
    policy = Policy()
    masters = [parameter.detach().clone() for parameter in policy.parameters()]
    policy.to(torch.bfloat16)
    policy = DistributedDataParallel(policy)
    options = {"lr": 2.5e-5, "weight_decay": 0.1}
    if repaired:
        optimizer = MasterWeightOptimizer(policy.parameters(), torch.optim.AdamW, masters=masters, **options)
    else:
        optimizer = torch.optim.AdamW(policy.parameters(), **options)
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
