"""`Accelerator(cpu=True, fsdp_plugin=...)` drops the plugin and runs DDP, without a word.

Memory, speed and precision of "FSDP" are then those of DDP, as is everything that is concluded from them.
Repair: what makes accelerate shard on a CPU (benchbox.backends.accelerators).
"""

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

from benchbox.backends.accelerators import fsdp_accelerator
from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP405",)
RANKS = 2


def main(repaired: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    accelerator = fsdp_accelerator(plugin) if repaired else Accelerator(cpu=True, fsdp_plugin=plugin)
    policy = Policy()
    policy, optimizer = accelerator.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=1e-3))
    for batch in batches(8):
        accelerator.backward(loss_of(policy, batch))
        optimizer.step()
        optimizer.zero_grad()
