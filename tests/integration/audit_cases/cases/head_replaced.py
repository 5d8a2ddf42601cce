"""The head is replaced for new actions, and the optimizer was built before: it keeps the old head, which nobody calls.

The rest of the policy trains, so the loss falls; the new head stays as it was drawn.
Repair: build the optimizer when the model is complete.
"""

import torch
from torch import nn

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP404",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    policy.head = nn.Linear(32, 16)
    if repaired:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        optimizer.step()
        policy.zero_grad()
