"""The default dtype is set to bfloat16 while a backbone is loaded, and never set back.

The policy is float32 again, but whatever the loop makes without a dtype is bfloat16 from now on: masks, positions, running
means of the loss.
Repair: set it back.
"""

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP603",)
RANKS = 1


def main(repaired: bool) -> None:
    torch.set_default_dtype(torch.bfloat16)
    policy = Policy().float()
    if repaired:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
