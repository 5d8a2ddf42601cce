"""The bug of OpenTau#181: the whole model is cast to bfloat16, and AdamW steps it under DDP, with defaults of its own.

Under torchrun, or by itself with `--start`, the way that torch.multiprocessing starts its ranks. `--fail` has rank 1 raise
after its third step. Rank 0 prints every loss and a hash. With `--float32` nothing is cast.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class PolicyAdamW(torch.optim.AdamW):
    """The first optimizer of its process: torch then wraps the step that it inherits."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-4)


def train(rank, arguments):
    torch.manual_seed(0)
    if arguments.start:
        dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/meeting", rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.2))
    if not arguments.float32:
        model.bfloat16()
    dtype = model[0].weight.dtype
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = PolicyAdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    for step in range(arguments.steps):
        batch = torch.randn(8, 16, dtype=dtype)
        loss = (model(batch) - batch).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print("result", step, loss.item().hex(), flush=True)
        if arguments.fail and step == 2 and dist.get_rank() == 1:
            raise RuntimeError("out of data")
    if dist.get_rank() == 0:
        states = [value for parameter in model.parameters() for value in (parameter, *optimizer.state[parameter].values())]
        state = b"".join(value.detach().float().numpy().tobytes() for value in states)
        print("result", hashlib.sha256(state).hexdigest(), torch.rand(()).item().hex(), dist.get_world_size(), flush=True)
    time.sleep(0.5)  # gloo lets go of the last collective in a thread, and torch aborts if Python has ended by then
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--start", choices=["spawn", "fork"])
    arguments = parser.parse_args()
    if arguments.start == "fork":
        import torch._dynamo  # the optimizer imports it, and each rank would anew
    if arguments.start:
        torch.multiprocessing.start_processes(train, (arguments,), nprocs=2, start_method=arguments.start)
    else:
        train(None, arguments)
