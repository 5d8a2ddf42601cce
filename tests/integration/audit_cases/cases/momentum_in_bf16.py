"""Momentum is stored in bfloat16 to save memory, beside float32 weights.

SGD's arithmetic takes any dtype it finds there. Each step rounds the sum of the last ten gradients to 8 bits.
Repair: leave the buffer in float32.
"""

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP202",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not repaired:
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].to(torch.bfloat16)
