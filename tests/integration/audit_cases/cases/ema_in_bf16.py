"""An EMA of the weights is kept in bfloat16, where its updates vanish: at the end it holds the weights of the beginning.

At a decay of 0.999 the average takes a thousandth of the difference to the weights, and bfloat16 resolves a 256th of a number.
Repair: keep the average in float32.
"""

import copy

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP107",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy()
    average = copy.deepcopy(policy).to(torch.float32 if repaired else torch.bfloat16).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for averaged, parameter in zip(average.parameters(), policy.parameters(), strict=True):
                averaged.lerp_(parameter.to(averaged.dtype), 0.001)
