"""Steps that accelerate takes because its data ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TRAINING = """
import json
import sys

import accelerate
import torch

from benchbox.audit.judge import judge
from benchbox.observer.observer import StepObserver

batches, accumulation = map(int, sys.argv[1:])
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.ones(batches, 4))
model, optimizer, data = accelerator.prepare(model, optimizer, data)
with StepObserver(source="command", steps=4) as observer:
    while observer.steps_observed < 4:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
facts = observer.facts()
print(json.dumps({
    "ends": [step.ends_epoch for step in facts.steps],
    "micro_batches": [step.micro_batches for step in facts.steps],
    "clean": "BXP403" in judge([facts]).clean,
}))
"""


@pytest.mark.parametrize(
    ("batches", "accumulation", "ends"),
    [(2, 4, [True] * 4), (3, 2, [False, True] * 2)],
    ids=["an epoch shorter than the accumulation", "every other step is cut short"],
)
def test_steps_that_the_end_of_the_data_cuts_short_are_marked_and_no_fault(batches, accumulation, ends):
    command = [sys.executable, "-c", TRAINING, str(batches), str(accumulation)]
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert (seen["ends"], seen["clean"]) == (ends, True)
    assert seen["micro_batches"][0] == min(batches, accumulation)
