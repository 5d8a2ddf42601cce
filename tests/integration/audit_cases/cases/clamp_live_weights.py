"""Weights are clamped after each step, and only the live ones: the masters know nothing of it.

The model computes with other weights than those that are trained, and each rounding undoes the clamp.
Repair: clamp the masters and round them again.
"""

import torch

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP104",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in optimizer.masters if repaired else optimizer.live:
                parameter.clamp_(-0.1, 0.1)
        if repaired:
            optimizer.round_into_live()
        optimizer.zero_grad()
