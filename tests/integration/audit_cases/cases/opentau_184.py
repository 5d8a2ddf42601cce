"""OpenTau#184: a checkpoint of bfloat16 moments goes on under masters, in float32 by type only.

`load_state_dict` casts the state to the dtype of what is stepped, so the load succeeds; the bits that bfloat16 dropped are
gone, and nothing says so.
Repair: resume from moments that were float32 when they were saved.
"""

import torch

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP502",)
ALSO = ("BXP501",)  # the weights went through bfloat16 too; that the load widened the moments is no fault of its own
RANKS = 1


def earlier(repaired: bool) -> None:
    """The run whose checkpoint is resumed: before the trainer had masters, or since."""
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3) if repaired else torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for batch in batches(6, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = optimizer.masters if repaired else [parameter.float() for parameter in policy.parameters()]
    torch.save({"optimizer": optimizer.state_dict(), "masters": masters}, "checkpoint.pt")


def main(repaired: bool) -> None:
    saved = torch.load("checkpoint.pt")
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])
    for master, saved_master in zip(optimizer.masters, saved["masters"], strict=True):
        master.data.copy_(saved_master)
    optimizer.round_into_live()
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
