"""Asks for a line, then trains until somebody ends it."""

import itertools

import torch

print("read:", input(), flush=True)
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in itertools.count():
    weight.grad = torch.ones(4)
    optimizer.step()
    if step == 8:
        print("trains", flush=True)
    if step > 8:
        torch.zeros(2**20).sum()
