"""Autocast was switched from bfloat16 to float16 for an older GPU, and nothing scales the loss.

Gradients below 6e-8 are zero in float16, and nobody sees which.
Repair: a GradScaler.
"""

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP305",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=repaired)
    for batch in batches(8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(policy, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
