"""Data-parallel training whose ranks torch.multiprocessing starts, as in torch's ImageNet example."""

import argparse
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checksums import print_checksums
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size, dtype):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29617", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(22):
        x = torch.randn(8, 16, dtype=dtype)
        loss = (model(x).float() - x[:, :4].float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print_checksums(model.parameters(), losses)
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    mp.spawn(train, nprocs=2, args=(2, getattr(torch, args.dtype)))
