"""An exponential moving average of the weights, evaluated at the end."""

import argparse
import copy

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--ema-dtype", default="float32")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
ema = copy.deepcopy(model).to(getattr(torch, args.ema_dtype)).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(24):
    x = torch.randn(8, 16)
    loss = (model(x) - x[:, :4]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter.to(average.dtype), 1e-4)
    losses.append(loss.item())
print_checksums([*model.parameters(), *ema.parameters()], losses)
