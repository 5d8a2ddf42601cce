"""Eight micro-batches are summed in the bfloat16 gradients of the live parameters (compare pytorch#106395).

The masters are float32 and so is the step; what is lost is lost before, in each addition to a sum that has grown.
Repair: float32 parameters under autocast, whose gradients are float32.
"""

import torch

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP301",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy() if repaired else Policy().to(torch.bfloat16)
    dtype = next(policy.parameters()).dtype
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3) if repaired else Masters(policy.parameters(), lr=1e-3)
    for micro, batch in enumerate(batches(64, dtype), start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(policy, batch) / 8
        loss.backward()
        if micro % 8 == 0:
            optimizer.step()
            optimizer.zero_grad()
