"""ZeRO-2 with `torch_autocast` says it reduces gradients in float32, and reduces them in bfloat16.

Modules that DeepSpeed takes for safe in lower precision, all linear layers among them, have their gradients cast before they
are reduced; `communication_data_type` still reads float32.
Repair: declare no module safe.
"""

import deepspeed
import torch

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP303",)
RANKS = 2


def main(repaired: bool) -> None:
    join_ranks()
    autocast = {"enabled": True, "dtype": "bfloat16"}
    if repaired:
        autocast["lower_precision_safe_modules"] = []
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "torch_autocast": autocast,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
        "steps_per_print": 2**31,
    }
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)
    for batch in batches(8):
        engine.backward(loss_of(engine, batch))
        engine.step()
