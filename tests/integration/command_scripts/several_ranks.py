"""Trains on several ranks the way its argument says, with dropout. Rank 0 prints every loss and a hash."""

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("backend", choices=["accelerate", "deepspeed"])
parser.add_argument("--local_rank", type=int)  # the deepspeed launcher passes it
backend = parser.parse_args().backend

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

if backend == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    backward = accelerator.backward
else:
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    backward = model.backward
    optimizer = model  # the engine steps and clears

torch.manual_seed(1 + dist.get_rank())
dtype = next(model.parameters()).dtype
for step in range(8):
    batch = torch.randn(4, 16, dtype=dtype)
    loss = (model(batch) - batch).float().square().mean()
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    if dist.get_rank() == 0:
        print("result", step, loss.item().hex(), flush=True)
if dist.get_rank() == 0:
    state = b"".join(value.detach().float().numpy().tobytes() for value in model.parameters())
    print("result", hashlib.sha256(state).hexdigest(), torch.rand(()).item().hex(), dist.get_world_size(), flush=True)
time.sleep(0.5)  # gloo lets go of the last collective in a thread, and torch aborts if Python has ended by then
dist.destroy_process_group()
