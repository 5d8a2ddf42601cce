"""OpenTau#185: every resume makes the masters anew from the bfloat16 weights.

The checkpoint holds the live weights and the state of the inner optimizer; the masters are neither. What they held below
bfloat16's precision is gone after each resume.
Repair: save the masters, and round the live weights from them.
"""

import torch
from tiny import Masters, Policy, batches, loss_of

RULES = ("BXP501",)
RANKS = 1


def train(policy: Policy, optimizer: Masters, steps: int) -> None:
    for batch in batches(steps, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def earlier(repaired: bool) -> None:
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    train(policy, optimizer, 6)
    saved = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "masters": optimizer.masters}
    torch.save(saved, "checkpoint.pt")


def main(repaired: bool) -> None:
    saved = torch.load("checkpoint.pt")
    policy = Policy().to(torch.bfloat16)
    policy.load_state_dict(saved["policy"])
    optimizer = Masters(policy.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])
    if repaired:
        for master, held in zip(optimizer.masters, saved["masters"], strict=True):
            master.data.copy_(held)
    train(policy, optimizer, 8)
