"""`benchbox audit-precision -- CMD` of a training whose optimizer step is compiled."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

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


SCALED = """
import torch
from torch import nn

model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer.step = torch.compile(optimizer.step, backend="eager")
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for _ in range(4):
    scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("compiled") / "train.py"
    script.write_text(SCRIPT)
    return script


@pytest.fixture(scope="module")
def audited(script: Path) -> subprocess.CompletedProcess[str]:
    audit = [sys.executable, "-m", "benchbox.cli.app", "audit-precision", "--steps", "4", "--"]
    return run(*audit, sys.executable, script)


@pytest.mark.exhaustive
def test_a_compiled_step_trains_as_without_the_audit(script: Path, audited: subprocess.CompletedProcess[str]) -> None:
    """The bits of both; by default only `test_compiled_trainings` compares them, without the command."""
    assert run(sys.executable, script).stdout.strip() == audited.stdout.strip().splitlines()[0]


def test_a_compiled_step_fails_as_not_observed(audited: subprocess.CompletedProcess[str]) -> None:
    assert audited.stdout.startswith("result ")
    assert audited.returncode == 3, audited.stderr
    assert audited.stderr.splitlines()[-1] == "error: no optimizer step was seen: the step is compiled: not observed"
    assert "the step is compiled: not observed" in audited.stdout
    assert "BXP101 error" not in audited.stdout


@pytest.mark.exhaustive  # by default `test_compiled_trainings` reads what the command prints
def test_a_compiled_step_under_a_loss_scaler_is_not_taken_for_one_that_was_skipped(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCALED)
    audited = run(sys.executable, "-m", "benchbox.cli.app", "audit-precision", "--steps", "4", "--", sys.executable, script)
    assert audited.returncode == 3, audited.stderr
    assert audited.stderr.splitlines()[-1] == "error: no optimizer step was seen: the step is compiled: not observed"
    assert "BXP305 error" not in audited.stdout
