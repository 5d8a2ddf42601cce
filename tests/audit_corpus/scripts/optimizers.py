"""One regression with optimizers from PyPI: optimizers.py NAME [--dtype bfloat16]."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--weight-decay", type=float, default=0.0, help="of optimi")
args = parser.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)).to(
    dtype
)
parameters = list(model.parameters())
if args.name == "bitsandbytes":
    import bitsandbytes

    optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=3e-4, min_8bit_size=1024)
elif args.name == "lion":
    from lion_pytorch import Lion

    optimizer = Lion(parameters, lr=1e-4, weight_decay=1e-2)
elif args.name == "schedulefree":
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(parameters, lr=1e-3, warmup_steps=5)
    optimizer.train()
elif args.name.startswith("torchao"):
    from torchao.optim import AdamW4bit, AdamW8bit

    kind = AdamW4bit if "4bit" in args.name else AdamW8bit
    optimizer = kind(parameters, lr=3e-4, bf16_stochastic_round=args.name.endswith("stochastic"))
elif args.name == "optimi":
    import optimi

    optimizer = optimi.AdamW(parameters, lr=3e-4, weight_decay=args.weight_decay)  # sums 16-bit weights by Kahan's method
else:
    from transformers import Adafactor

    optimizer = Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)

losses = []
for _ in range(22):
    x = torch.randn(8, 64)
    loss = (model(x.to(dtype)).float() - x[:, :8]).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print_checksums(parameters, losses)
