"""The observer watches operations by a dispatch mode; a training may have modes of its own."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from benchbox.observer.observer import StepObserver

STEPS = 6


def trained(counted: set[int]):
    """The facts of a training that counts the FLOPs of some of its steps, and the counts."""
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with StepObserver(source="command", steps=STEPS) as observer:
        for index in range(1, STEPS + 3):
            if index in counted:
                with FlopCounterMode(display=False) as counter:
                    step()
                counts.append(counter.get_total_flops())
            else:
                step()
    assert _get_current_dispatch_mode() is None
    return observer.facts(), counts


def test_operations_are_seen_beside_a_mode_that_comes_and_goes_in_other_steps():
    facts, counts = trained({1, 6})
    assert facts.products
    assert counts == trained({1, STEPS + 2})[1]


def test_a_step_inside_a_mode_is_counted_by_it_and_not_watched_by_us():
    facts, counts = trained(set(range(1, STEPS + 3)))
    assert len(set(counts)) == 1
    assert facts.missing["products"] == "the training steps its optimizer inside a dispatch mode of its own"


def test_a_mode_entered_while_operations_are_watched_counts_its_own_step_and_no_other():
    """Modes can only be left in reverse: ours waits until the program's is gone."""
    plain = trained({1})[1]
    facts, counts = trained({STEPS // 2 + 1})
    assert counts == plain
    assert facts.missing["products"] == "the training entered a dispatch mode of its own while operations were watched"
