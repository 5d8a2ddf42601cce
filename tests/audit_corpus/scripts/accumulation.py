"""Gradient accumulation over four micro-batches, with a schedule."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--schedule-per-micro-batch", action="store_true")
parser.add_argument("--forget-schedule", action="store_true", help="never advance the warm-up, which begins at zero")
args = parser.parse_args()
ACCUMULATION = 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
losses = []
for micro_step in range(22 * ACCUMULATION):
    x = torch.randn(8, 16)
    loss = (model(x) - x[:, :4]).square().mean() / ACCUMULATION
    loss.backward()
    losses.append(loss.item())
    if args.schedule_per_micro_batch:
        schedule.step()
    if (micro_step + 1) % ACCUMULATION:
        continue
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if not args.schedule_per_micro_batch and not args.forget_schedule:
        schedule.step()
print_checksums(model.parameters(), losses)
