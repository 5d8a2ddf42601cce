"""pytorch#147437: AdamW over float16 parameters turns them into NaN in the first step.

The default eps of 1e-8 is zero in float16. Where squares of small gradients are zero too, Adam divides by nothing.
Repair: float32 parameters, float16 only inside autocast, and a scaled loss.
"""

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP204",)
ALSO = ("BXP101", "BXP202", "BXP203", "BXP305")
RANKS = 1


def main(repaired: bool) -> None:
    policy = Policy()
    if not repaired:
        policy.to(torch.float16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=repaired)
    for batch in batches(8, torch.float32 if repaired else torch.float16):
        with torch.autocast("cpu", dtype=torch.float16, enabled=repaired):
            loss = 1e-3 * loss_of(policy, batch)  # one term of many: its gradients are small
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
