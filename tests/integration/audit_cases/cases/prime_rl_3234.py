"""prime-rl#3234: masters kept aside are stale after a resume of the model alone.

With `skip_optimizer` the checkpoint's weights are loaded into the model and the masters, made before, still hold the old ones.
The first step rounds those back over what was loaded.
Repair: refresh the masters after a load.
"""

import torch

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP504",)
RANKS = 1


def earlier(repaired: bool) -> None:
    policy = Policy().to(torch.bfloat16)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.25)
    torch.save(policy.state_dict(), "checkpoint.pt")


def main(repaired: bool) -> None:
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    policy.load_state_dict(torch.load("checkpoint.pt"))
    if repaired:
        for parameter, master in zip(optimizer.live, optimizer.masters, strict=True):
            master.data.copy_(parameter)
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
