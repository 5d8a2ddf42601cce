"""Clipping that acts on nothing (in the manner of OpenTau#186): the gradients are upcast for the masters, and then the live
ones are clipped.

The norm in the log is right and the step is taken with gradients that nobody clipped.
Repair: clip what the masters hold.
"""

import torch

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP304",)
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    for batch in batches(8, torch.bfloat16):
        (100 * loss_of(policy, batch)).backward()
        optimizer.copy_gradients()
        torch.nn.utils.clip_grad_norm_(optimizer.masters if repaired else optimizer.live, max_norm=1.0)
        optimizer.inner.step()
        optimizer.round_into_live()
        optimizer.zero_grad()
