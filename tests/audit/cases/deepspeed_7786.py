"""DeepSpeed#7786: with bf16 and ZeRO stage 0, checkpoints hold no optimizer state.

One flag takes bf16 for ZeRO, which saves its partitions in files of their own; at stage 0 there are none, so the state is
nowhere. A run that goes back to its last checkpoint has its weights, and an Adam that starts anew.
Repair: ask for ZeRO itself.
"""

import torch
from tiny import Masters, Policy, batches, loss_of

RULES = ("BXP503",)
RANKS = 1
STAGE = 0


def save_checkpoint(policy: Policy, optimizer: Masters, repaired: bool) -> None:
    partitioned = STAGE > 0 if repaired else STAGE > 0 or next(policy.parameters()).dtype == torch.bfloat16
    state = optimizer.state_dict()
    if partitioned:
        state["state"] = {}
    torch.save({"module": policy.state_dict(), "optimizer": state, "masters": optimizer.masters}, "checkpoint.pt")


def load_checkpoint(policy: Policy, optimizer: Masters) -> None:
    saved = torch.load("checkpoint.pt")
    policy.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    for master, held in zip(optimizer.masters, saved["masters"], strict=True):
        master.data.copy_(held)


def main(repaired: bool) -> None:
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    for step, batch in enumerate(batches(8, torch.bfloat16), start=1):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            save_checkpoint(policy, optimizer, repaired)
        if step == 4:  # as after a loss that jumped
            load_checkpoint(policy, optimizer)
