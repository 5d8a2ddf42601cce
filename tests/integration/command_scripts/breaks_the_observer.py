"""Breaks the observer at its first look at an optimizer, as a fault of its own would, and trains."""

import sys

import torch
from torch import nn


def fail(*_):
    raise KeyError("eps")


recording = next(module for name, module in sys.modules.items() if name.endswith("observer.recording"))
recording.StepRecorder.before_call = fail
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
