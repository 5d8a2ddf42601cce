"""DeepSpeed#4141: weights loaded after `initialize` are gone after the first step.

ZeRO copied its float32 partitions from the model when the engine was built. A load of the module alone refreshed them under
fp16 only; under bf16 the first step rounds the old partitions over the loaded weights.
Repair: refresh them whatever the 16 bits are.
"""

import deepspeed
import torch
from tiny import Policy, batches, join_ranks, loss_of

RULES = ("BXP504",)
RANKS = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
    "steps_per_print": 2**31,
}


def main(repaired: bool) -> None:
    join_ranks()
    policy = Policy()
    pretrained = {name: value + 0.25 for name, value in policy.state_dict().items()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=CONFIG)
    engine.module.load_state_dict(pretrained)
    if repaired:
        engine.optimizer.refresh_fp32_params()
    for batch in batches(8, torch.bfloat16):
        engine.backward(loss_of(engine, batch))
        engine.step()
