"""DeepSpeed#7786: with bf16 and ZeRO stage 0, checkpoints hold no optimizer state.

A flag took bf16 for ZeRO, which saves its partitions in files of their own; at stage 0 there are none, so the state is nowhere.
A run that goes back to its last checkpoint has its weights, and an Adam that starts anew.
Repair: ask for ZeRO itself (DeepSpeed since then; here the state is taken out of the file that it writes).
"""

import deepspeed
import torch
import torch.distributed as dist

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP503",)
RANKS = 2
CONFIG = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "steps_per_print": 2**31}


def forget_optimizer_state() -> None:
    if dist.get_rank() == 0:
        path = "checkpoint/mp_rank_00_model_states.pt"
        saved = torch.load(path, weights_only=False)
        saved["optimizer"]["optimizer_state_dict"]["state"] = {}
        torch.save(saved, path)
    dist.barrier()


def main(repaired: bool) -> None:
    join_ranks()
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=CONFIG)
    for step, batch in enumerate(batches(8, torch.bfloat16), start=1):
        engine.backward(loss_of(engine, batch))
        engine.step()
        if step == 2:
            engine.save_checkpoint(".", tag="checkpoint")
            if not repaired:
                forget_optimizer_state()
        if step == 4:  # as after a loss that jumped
            engine.load_checkpoint(".", tag="checkpoint")
