"""The remedy of forums for float16 Adam (pytorch#147437): raise eps to 1e-4 and train on.

Nothing is NaN any more, but the squares of gradients below 2.4e-4 are still zero in float16: the second moment says nothing
where it is needed, and the step is m / eps.
Repair: float32 parameters and state, float16 only inside autocast, and a scaled loss.
"""

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP203",)
ALSO = ("BXP101", "BXP202", "BXP305")
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy()
    if not repaired:
        policy.to(torch.float16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=repaired)
    for batch in batches(8, torch.float32 if repaired else torch.float16):
        with torch.autocast("cpu", dtype=torch.float16, enabled=repaired):
            loss = 1e-2 * loss_of(policy, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
