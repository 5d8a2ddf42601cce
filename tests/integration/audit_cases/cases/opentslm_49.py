"""The loss is computed on the module inside DDP, whose reducer then never runs: every rank trains a model of its own.

Repair: call the wrapper.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP407",)
RANKS = 2


def main(repaired: bool) -> None:
    join_ranks()
    model = DistributedDataParallel(Policy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches(8):
        loss_of(model if repaired else model.module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
