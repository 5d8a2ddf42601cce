"""Data-parallel regression with a warm-up schedule: torchrun --nproc_per_node 2 ddp.py."""

import argparse
import time

import torch
import torch.distributed as dist
from checksums import print_checksums
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
parser.add_argument("--compress", action="store_true", help="reduce gradients in float16")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
dtype = getattr(torch, args.dtype)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 4)).to(dtype)
model = DistributedDataParallel(model)
if args.compress:
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
data = TensorDataset(torch.randn(208, 16), torch.randn(208, 4))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))

losses = []
for x, y in loader:
    loss = nn.functional.mse_loss(model(x.to(dtype)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print_checksums(model.parameters(), losses)
time.sleep(0.5)  # gloo finishes the last collective in a thread of its own
dist.destroy_process_group()
