"""`benchbox audit-precision -- CMD` of a training whose optimizer step is compiled."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = torch.compile(optimizer.step, backend="eager")
for _ in range(4):
    model(torch.randn(4, 8)).square().mean().backward()
    step()
    optimizer.zero_grad()
print("result", model.weight.sum().item().hex())
"""


def test_a_compiled_step_fails_as_not_observed_and_trains_as_without_the_audit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    plain = subprocess.run([sys.executable, script], **options)
    audit = [sys.executable, "-m", "benchbox.cli.app", "audit-precision", "--steps", "4", "--"]
    audited = subprocess.run([*audit, sys.executable, script], **options)
    assert plain.stdout.strip() == audited.stdout.strip().splitlines()[0]
    assert audited.returncode == 3, audited.stderr
    assert audited.stderr.splitlines()[-1] == "error: no optimizer step was seen: the step is compiled: not observed"
    assert "the step is compiled: not observed" in audited.stdout
    assert "BXP101 error" not in audited.stdout
