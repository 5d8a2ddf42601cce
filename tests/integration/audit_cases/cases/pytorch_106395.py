"""pytorch#106395: training with bfloat16 gradient reduction is stable on 96 GPUs and unstable on 384.

A sum that is passed from rank to rank in bfloat16 is rounded at every addition. Over two ranks that is nothing, and the
finding says no more than that it is so.
Repair: reduce in float32.
"""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP302",)
SEVERITIES = {"BXP302": "info"}  # of so few ranks
RANKS = 2


def main(repaired: bool) -> None:
    join_ranks()
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if repaired else torch.bfloat16)
    device = torch.device("cpu")
    policy = FullyShardedDataParallel(Policy(), mixed_precision=precision, use_orig_params=True, device_id=device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
