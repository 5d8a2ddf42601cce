"""A head beside the model that DDP wraps: each rank trains one of its own, and the checkpoint has that of rank 0.

Repair: give it to `prepare` too.
"""

import torch
from accelerate import Accelerator
from torch import nn

from tests.support.tiny_training import Policy, batches

RULES = ("BXP407",)
RANKS = 2


def main(repaired: bool) -> None:
    accelerator = Accelerator(cpu=True)
    policy, head = Policy(), nn.Linear(16, 16)
    optimizer = torch.optim.AdamW([*policy.parameters(), *head.parameters()], lr=1e-3)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    if repaired:
        head = accelerator.prepare(head)
    for batch in batches(8):
        accelerator.backward((head(policy(batch)) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
