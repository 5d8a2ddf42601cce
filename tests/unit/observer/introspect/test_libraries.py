"""Training libraries are recognised by their calls of an optimizer's step."""

from __future__ import annotations

import subprocess
import sys

TRAININGS = """
import accelerate
import torch
from benchbox.observer.observer import StepObserver

def train(prepare):
    with StepObserver(source="command", steps=2) as observer:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = prepare(model, optimizer)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    print(*observer.facts().libraries, sep=",")

train(lambda *objects: objects)
train(accelerate.Accelerator(cpu=True).prepare)
"""


def test_a_library_takes_part_if_it_calls_the_step_and_not_if_it_is_only_there():
    command = [sys.executable, "-c", TRAININGS]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == "\naccelerate\n"
