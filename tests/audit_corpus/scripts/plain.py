"""One process, one optimizer: the loop of torch's beginner tutorials."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--default-dtype", default="float32")
parser.add_argument("--save")
parser.add_argument("--load")
args = parser.parse_args()
torch.set_default_dtype(getattr(torch, args.default_dtype))
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).to(dtype)
if args.load:
    model.load_state_dict(torch.load(args.load))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
losses = []
for _ in range(24):
    x = torch.randn(8, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
        output = model(x)
    loss = (output.float() - x[:, :4].float()).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if args.save:
    torch.save(model.state_dict(), args.save)
print_checksums(model.parameters(), losses)
