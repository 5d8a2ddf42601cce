"""DeepSpeed#4141: weights loaded into an engine are gone after its first step.

ZeRO copied its float32 partitions from the model when the engine was built. A load of the module alone refreshed them under
fp16 only; under bf16 the first step rounds the old partitions over the loaded weights.
Repair: refresh them whatever the 16 bits are, as `load_checkpoint(load_module_only=True)` does since then.
"""

import deepspeed
import torch

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP504",)
RANKS = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
    "steps_per_print": 2**31,
}


def build(lr: float) -> deepspeed.DeepSpeedEngine:
    join_ranks()
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=CONFIG)[0]


def train(engine: deepspeed.DeepSpeedEngine) -> None:
    for batch in batches(8, torch.bfloat16):
        engine.backward(loss_of(engine, batch))
        engine.step()


def earlier(repaired: bool) -> None:
    """Pre-training, whose weights are fine-tuned."""
    engine = build(lr=1e-2)
    train(engine)
    engine.save_checkpoint(".", tag="pretrained")


def main(repaired: bool) -> None:
    engine = build(lr=1e-3)
    if repaired:
        engine.load_checkpoint(".", tag="pretrained", load_module_only=True)
    else:
        saved = torch.load("pretrained/mp_rank_00_model_states.pt", weights_only=False)
        engine.load_module_state_dict(saved)
    train(engine)
