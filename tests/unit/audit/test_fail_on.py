"""The mildest finding that fails an audit."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.errors import EXIT_CELL_FAILED, ThresholdError

if TYPE_CHECKING:
    from pathlib import Path

TRAINS_AND_FAILS = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
raise SystemExit(7)
"""


@pytest.mark.parametrize(("options", "fails"), [((), False), (("--fail-on", "error"), False), (("--fail-on", "warning"), True)])
def test_a_warning_fails_the_audit_if_asked_to(tmp_path: Path, options: tuple[str, ...], fails: bool) -> None:
    save_file({"rope.inv_freq": torch.ones(4).bfloat16()}, tmp_path / "weights.safetensors")
    audit = CliRunner().invoke(app, ["audit-precision", *options, "--checkpoint", str(tmp_path / "weights.safetensors")])
    assert "BXP602 warning" in audit.stdout
    assert isinstance(audit.exception, ThresholdError) is fails
    assert "BXP602" in str(audit.exception) or not fails


def test_a_command_that_fails_after_its_steps_is_no_green_report_for_programs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS_AND_FAILS)
    audit = [sys.executable, "-m", "benchbox.cli.app", "audit-precision", "--select", "BXP101", "--format", "junit", "--"]
    done = subprocess.run([*audit, sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_CELL_FAILED
    (suite,) = ET.fromstring(done.stdout)
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["errors"]) == ("2", "0", "1")
    (error,) = suite.iter("error")
    assert error.attrib["message"].startswith("the command failed: ")
