"""accelerate#2624: the same model needs a larger learning rate under FSDP than under DeepSpeed.

It is loaded in bfloat16. DeepSpeed keeps float32 masters of whatever it gets; FSDP shards and steps what it is given. Since
then accelerate upcasts trainable parameters after wrapping, but only where it is told of mixed precision.
Repair: tell it.
"""

import torch
from accelerate.utils import FullyShardedDataParallelPlugin

from benchbox.backends.accelerators import fsdp_accelerator
from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP101",)
ALSO = ("BXP102", "BXP103", "BXP201")
RANKS = 2


def main(repaired: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, auto_wrap_policy="no_wrap", use_orig_params=True, sharding_strategy="FULL_SHARD"
    )
    accelerator = fsdp_accelerator(plugin, upcasts=repaired)
    if repaired:
        plugin.set_mixed_precision("bf16")
    policy = accelerator.prepare(Policy().to(torch.bfloat16))
    optimizer = accelerator.prepare(torch.optim.AdamW(policy.parameters(), lr=2.5e-5, weight_decay=0.0))
    for batch in batches(8, torch.bfloat16):
        accelerator.backward(loss_of(policy, batch))
        optimizer.step()
        optimizer.zero_grad()
