"""The observer records operations by a dispatch mode; a training may use modes of its own."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from benchbox.observer.observer import StepObserver

STEPS = 6


def train(counted_steps: set[int]):
    """Return the facts of a training that counts the FLOPs of some of its steps, and the counts."""
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with StepObserver(source="command", steps=STEPS) as observer:
        for index in range(1, STEPS + 3):
            if index in counted_steps:
                with FlopCounterMode(display=False) as counter:
                    step()
                counts.append(counter.get_total_flops())
            else:
                step()
    assert _get_current_dispatch_mode() is None
    return observer.facts(), counts


def test_operations_are_recorded_beside_a_mode_that_is_used_in_other_steps():
    facts, counts = train({1, 6})
    assert facts.products
    assert counts == train({1, STEPS + 2})[1]


def test_a_step_inside_a_mode_is_counted_by_it_and_not_recorded_by_the_observer():
    facts, counts = train(set(range(1, STEPS + 3)))
    assert len(set(counts)) == 1
    assert facts.missing["products"] == "the training steps its optimizer inside a dispatch mode of its own"


def test_a_mode_entered_while_operations_are_recorded_counts_exactly_its_own_step():
    """Modes can only be left in reverse order: the observer's waits until the program has left its own."""
    plain = train({1})[1]
    facts, counts = train({STEPS // 2 + 1})
    assert counts == plain
    assert facts.missing["products"].startswith("the training entered a dispatch mode of its own, or went on in another thread")
