"""The schedule advances with every micro-batch, four times a step (a trap of accelerate's loops, in plain torch).

A warm-up of 1000 steps is over after 250, and so is everything after it.
Repair: advance it where the optimizer steps.
"""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP403",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    schedule = CosineAnnealingLR(optimizer, T_max=1000)
    for micro, batch in enumerate(batches(32), start=1):
        (loss_of(policy, batch) / 4).backward()
        if micro % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            if repaired:
                schedule.step()
        if not repaired:
            schedule.step()
