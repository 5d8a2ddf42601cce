"""pytorch#107843: the optimizer was built before FSDP wrapped the model, and trains nothing.

Without `use_orig_params` wrapping replaces the parameters by flat ones. The optimizer holds the old ones, which never get a
gradient: it steps, no weight moves, and nothing fails (accelerate#3256 describes the same).
Repair: build it after wrapping.
"""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP404",)
RANKS = 2


def main(repaired: bool) -> None:
    join_ranks()
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    policy = FullyShardedDataParallel(policy, use_orig_params=False, device_id=torch.device("cpu"))
    if repaired:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        optimizer.step()
        policy.zero_grad()
