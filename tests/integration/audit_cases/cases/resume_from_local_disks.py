"""Every rank resumes from the latest checkpoint on its own disk, and one of them was not finished.

DDP sends the weights of the first rank to all, so they agree again; the moments and the step of each rank stay what it loaded,
and the replicas drift apart from the first step on.
Repair: agree on the checkpoint.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP205",)
ALSO = ("BXP407",)
RANKS = 2


def train(policy: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for batch in batches(steps):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def earlier(repaired: bool) -> None:
    join_ranks()
    policy = DistributedDataParallel(Policy())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for step in (4, 8):
        train(policy, optimizer, 4)
        saved = {"policy": policy.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, f"rank{dist.get_rank()}-step{step}.pt")


def main(repaired: bool) -> None:
    rank = dist.get_rank()
    saved = torch.load(f"rank{rank}-step{4 if rank == 1 and not repaired else 8}.pt")
    policy = Policy()
    policy.load_state_dict(saved["policy"])
    policy = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])
    train(policy, optimizer, 8)
