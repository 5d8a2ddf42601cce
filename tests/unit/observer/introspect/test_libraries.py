"""Training libraries are recognised by their calls of an optimizer's step."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINING = """
import torch
from benchbox.observer.observer import StepObserver

with StepObserver(source="command", steps=2) as observer:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    {prepare}
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
print(*observer.facts().libraries)
"""
ACCELERATE = "import accelerate; model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, optimizer)"


@pytest.mark.parametrize(("prepare", "libraries"), [("pass", []), (ACCELERATE, ["accelerate"])])
def test_a_library_takes_part_if_it_calls_the_step_and_not_if_it_is_only_there(prepare, libraries):
    command = [sys.executable, "-c", TRAINING.format(prepare=prepare)]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split() == libraries
