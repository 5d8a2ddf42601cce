"""A scale so large that every scaled gradient overflows, and a scaler that may not lower it: no step is ever taken.

The loss is logged and stands still; nothing fails.
Repair: a scale that gradients bear.
"""

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP305",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 if repaired else 2.0**40, backoff_factor=0.999)
    for batch in batches(8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(policy, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
