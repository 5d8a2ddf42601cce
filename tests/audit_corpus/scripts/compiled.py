"""torch.compile of the model, of the optimizer's step, or of both."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["model", "optimizer", "step"])
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)


def train_step(x):
    loss = (model(x).float() - x[:, :4].float()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


if args.what == "model":
    model.compile()
elif args.what == "optimizer":
    optimizer.step = torch.compile(optimizer.step)
else:
    train_step = torch.compile(train_step)
losses = [train_step(torch.randn(8, 32, dtype=dtype)).item() for _ in range(22)]
print_checksums(model.parameters(), losses)
