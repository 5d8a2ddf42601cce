"""ZeRO-2 sums micro-batches in bfloat16 unless it is told otherwise: `grad_accum_dtype` is the model's dtype by default.

The masters are float32 and so is the step, so nothing in the configuration looks wrong.
Repair: `data_types: {grad_accum_dtype: fp32}`.
"""

import deepspeed
import torch

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP301",)
RANKS = 2


def train(stage: int, grad_accum_dtype: str | None) -> None:
    join_ranks()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": grad_accum_dtype},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
        "steps_per_print": 2**31,
    }
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)
    for batch in batches(32, torch.bfloat16):
        engine.backward(loss_of(engine, batch))
        engine.step()


def main(repaired: bool) -> None:
    train(2, "fp32" if repaired else None)
