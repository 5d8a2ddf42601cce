"""The mildest finding that fails an audit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.errors import ThresholdError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("options", "fails"), [((), False), (("--fail-on", "error"), False), (("--fail-on", "warning"), True)])
def test_a_warning_fails_the_audit_if_asked_to(tmp_path: Path, options: tuple[str, ...], fails: bool) -> None:
    save_file({"rope.inv_freq": torch.ones(4).bfloat16()}, tmp_path / "weights.safetensors")
    audit = CliRunner().invoke(app, ["audit-precision", *options, "--checkpoint", str(tmp_path / "weights.safetensors")])
    assert "BXP602 warning" in audit.stdout
    assert isinstance(audit.exception, ThresholdError) is fails
    assert "BXP602" in str(audit.exception) or not fails
