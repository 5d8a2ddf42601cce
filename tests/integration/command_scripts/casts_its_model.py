"""The bug of OpenTau#181: the whole model is cast to bfloat16, and AdamW steps it under DDP.

Under torchrun, or by itself with `--spawn`. `--fail` has rank 1 raise after its third step.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def train(rank, arguments):
    torch.manual_seed(0)
    if arguments.spawn:
        dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/meeting", rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model.bfloat16()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(arguments.steps):
        batch = torch.randn(8, 16, dtype=torch.bfloat16)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print("result", step, loss.item(), flush=True)
        if arguments.fail and step == 2 and dist.get_rank() == 1:
            raise RuntimeError("out of data")
    time.sleep(0.5)  # gloo lets go of the last collective in a thread, and torch aborts if Python has ended by then
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--spawn", action="store_true")
    arguments = parser.parse_args()
    if arguments.spawn:
        torch.multiprocessing.spawn(train, (arguments,), nprocs=2)
    else:
        train(None, arguments)
