"""A loss that is never finite: the scaler skips every step, and no optimizer takes one."""

import torch
from torch import nn

model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
for _ in range(4):
    scaler.scale(model(torch.ones(2, 8)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
