"""lerobot#3912: `accelerator.autocast()` does nothing, because the Accelerator was never told of mixed precision.

The policy says bfloat16 in its own configuration, and nobody passes that on: the forward pass runs in float32.
Repair: derive `mixed_precision` from the policy's dtype.
"""

import torch
from accelerate import Accelerator

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP601",)
RANKS = 1
CONTRACT = {"source": "policy.dtype", "compute": "bfloat16"}


def main(repaired: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if repaired else None)
    policy = Policy()
    policy, optimizer = accelerator.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=1e-3))
    for batch in batches(8):
        with accelerator.autocast():
            loss = loss_of(policy, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
