"""Training in bfloat16 with float32 masters, interrupted and resumed in one process."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--forget-masters", action="store_true", help="make masters from the 16-bit weights when resuming")
parser.add_argument("--copy-late", action="store_true", help="copy masters into the weights before the next step only")
args = parser.parse_args()
losses = []


def build():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    return model.bfloat16(), masters, torch.optim.AdamW(masters, lr=3e-4)


def copy_masters(model, masters):
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)


def train(model, masters, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(8, 16)
        loss = (model(x.bfloat16()).float() - x[:, :4]).square().mean()
        loss.backward()
        if args.copy_late:
            copy_masters(model, masters)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if not args.copy_late:
            copy_masters(model, masters)
        losses.append(loss.item())


torch.manual_seed(0)
model, masters, optimizer = build()
train(model, masters, optimizer, 6)
torch.save({"model": model.state_dict(), "masters": masters, "optimizer": optimizer.state_dict()}, "last.pt")

saved = torch.load("last.pt")
model, masters, optimizer = build()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
sources = model.parameters() if args.forget_masters else saved["masters"]
with torch.no_grad():
    for master, source in zip(masters, sources, strict=True):
        master.copy_(source)
train(model, masters, optimizer, 24)
print_checksums([*masters, *model.parameters()], losses)
