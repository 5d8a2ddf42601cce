"""torch's AMP recipe: float16 autocast with a GradScaler."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clip-scaled", action="store_true", help="clip before the gradients are unscaled")
parser.add_argument("--no-scaler", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=not args.no_scaler)
losses = []
for _ in range(24):
    x = torch.randn(8, 16)
    with torch.autocast("cpu", torch.float16):
        loss = (model(x) - x[:, :4]).square().mean()
    scaler.scale(loss).backward()
    if not args.clip_scaled:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
print_checksums(model.parameters(), losses)
