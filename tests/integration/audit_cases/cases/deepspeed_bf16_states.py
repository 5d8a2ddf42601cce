"""ZeRO-3 is told to keep masters and optimizer state in bfloat16, and keeps beta2 at 0.999.

It halves what ZeRO holds. `safe_get_full_fp32_param` and its like still return float32, so a look through them shows nothing.
Repair: float32 partitions, which ZeRO keeps by default.
"""

import deepspeed
import torch

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP101", "BXP201")
ALSO = ("BXP102",)
RANKS = 2


def main(repaired: bool) -> None:
    join_ranks()
    pure = {"bf16_master_weights_and_grads": not repaired, "bf16_optimizer_states": not repaired}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True, **pure},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 4096, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 2**31,
    }
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2.5e-5, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)
    for batch in batches(8, torch.bfloat16):
        engine.backward(loss_of(engine, batch))
        engine.step()
