"""An AdamW with defaults of its own, the first optimizer of the process: torch then wraps the step that it inherits."""

import torch
from torch import nn


class PolicyAdamW(torch.optim.AdamW):
    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-5, betas=(0.9, 0.95))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(torch.bfloat16)
optimizer = PolicyAdamW(model.parameters())
for _ in range(6):
    model(torch.randn(8, 16, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
