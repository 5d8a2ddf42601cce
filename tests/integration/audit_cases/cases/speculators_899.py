"""speculators#899: checkpoints convert the whole optimizer state to bfloat16, the step counters too.

bfloat16 counts to 256 and no further, so bias correction is wrong after a resume; the moments come back as float32 by type,
with the bits of bfloat16.
Repair: save optimizer state as it is.
"""

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP205", "BXP502")
RANKS = 1


def train(policy: Policy, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for batch in batches(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(policy, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def converted(state: object, dtype: torch.dtype) -> object:
    if isinstance(state, dict):
        return {name: converted(value, dtype) for name, value in state.items()}
    return state.to(dtype) if isinstance(state, torch.Tensor) else state


def earlier(repaired: bool) -> None:
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    train(policy, optimizer, 6)
    saved = optimizer.state_dict()
    if not repaired:
        saved["state"] = converted(saved["state"], torch.bfloat16)
    torch.save({"policy": policy.state_dict(), "optimizer": saved}, "checkpoint.pt")


def main(repaired: bool) -> None:
    saved = torch.load("checkpoint.pt")
    policy = Policy()
    policy.load_state_dict(saved["policy"])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])
    train(policy, optimizer, 8)
