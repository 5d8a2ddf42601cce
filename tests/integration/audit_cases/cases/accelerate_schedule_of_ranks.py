"""A schedule prepared by accelerate advances once a process in every step, so it ends after half its steps on two.

That is meant for schedules written for a single process (`split_batches=False`), and so the finding says no more than that it
is so; whoever counted their steps themselves is done too early.
Repair: do not prepare it, and advance it once a step.
"""

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP403",)
SEVERITIES = {"BXP403": "info"}
RANKS = 2


def main(repaired: bool) -> None:
    accelerator = Accelerator(cpu=True)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    schedule = CosineAnnealingLR(optimizer, T_max=1000)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    if not repaired:
        schedule = accelerator.prepare(schedule)
    for batch in batches(8):
        accelerator.backward(loss_of(policy, batch))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
