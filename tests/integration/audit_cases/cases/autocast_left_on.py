"""A float32 baseline that is none: the loop enters autocast whatever the configuration says.

The Accelerator was told `mixed_precision="no"`, and a `torch.autocast` from an experiment is still around the forward pass.
Repair: the Accelerator's own autocast, which follows the configuration.
"""

import torch
from accelerate import Accelerator

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP601",)
RANKS = 1


def main(repaired: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    policy = Policy()
    policy, optimizer = accelerator.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=1e-3))
    for batch in batches(8):
        with accelerator.autocast() if repaired else torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(policy, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
