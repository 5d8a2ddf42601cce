"""ZeRO-2 resumes with `load_from_fp32_weights: false`, and makes its masters of the bfloat16 weights.

The option is there for checkpoints without masters. With it every resume drops what the masters of the checkpoint held below
bfloat16's precision.
Repair: leave it at its default.
"""

import deepspeed
import torch

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP501",)
RANKS = 2


def build(repaired: bool) -> deepspeed.DeepSpeedEngine:
    join_ranks()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "load_from_fp32_weights": repaired,
            "reduce_bucket_size": 4096,
            "allgather_bucket_size": 4096,
        },
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
        "steps_per_print": 2**31,
    }
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


def train(engine: deepspeed.DeepSpeedEngine, steps: int) -> None:
    for batch in batches(steps, torch.bfloat16):
        engine.backward(loss_of(engine, batch))
        engine.step()


def earlier(repaired: bool) -> None:
    engine = build(repaired)
    train(engine, 12)
    engine.save_checkpoint(".", tag="checkpoint")


def main(repaired: bool) -> None:
    engine = build(repaired)
    engine.load_checkpoint(".", tag="checkpoint")
    train(engine, 8)
