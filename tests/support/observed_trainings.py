"""Small trainings, and their facts by an observer that is passed nothing but the source."""

from __future__ import annotations

import torch
from torch import nn

from benchbox.observer.observer import StepObserver

ELEMENTS = 2 * (8 * 8 + 8)


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    model.register_buffer("mean", torch.zeros(3))
    return model


def train(model, optimizer, steps, schedule=None, accumulation=1):
    losses = []
    for step in range(steps):
        for micro_step in range(accumulation):
            torch.manual_seed(step * accumulation + micro_step)
            batch = torch.randn(4, 8, dtype=next(model.parameters()).dtype)
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return losses


def train_masters(model, masters, optimizer, steps, write_back=lambda parameter, master: parameter.data.copy_(master)):
    """Train a bfloat16 model on masters, as a script does, which writes them back by `write_back` after every step."""
    for _ in range(steps):
        model(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            write_back(parameter, master)


def observe_training(model, optimizer, steps=6, **options):
    """Return the facts of a training that passes nothing to its observer."""
    with StepObserver(source="command", steps=steps) as observer:
        train(model, optimizer, steps, **options)
    return observer.facts()


def census_table(facts):
    return {(entry.kind, entry.dtype): (entry.tensors, entry.elements, entry.bytes) for entry in facts.entries}
