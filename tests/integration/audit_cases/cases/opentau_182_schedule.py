"""OpenTau#182: the schedule stays with an optimizer that is thrown away.

The repair of OpenTau#181 built masters and a new optimizer over them, after the schedule had been made for the first one. The
log shows the schedule's rates; the optimizer that steps keeps its first rate for ever.
Repair: build the schedule on the optimizer that steps.
"""

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP401",)
RANKS = 1


def warmup(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def main(repaired: bool) -> None:
    accelerator = Accelerator(cpu=True)
    policy = Policy().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, warmup)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    if repaired:
        schedule = LambdaLR(optimizer, warmup)
    policy, optimizer, schedule = accelerator.prepare(policy, optimizer, schedule)
    for batch in batches(8, torch.bfloat16):
        accelerator.backward(loss_of(policy, batch))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
