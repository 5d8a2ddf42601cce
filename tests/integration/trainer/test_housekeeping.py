"""A training goes on when what follows a complete checkpoint fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.commands import run_in_process

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: pi0
size: tiny
data: synthetic
backend: single
world_size: 1
batch: 1
steps: 3
log_every: 1
checkpoint: {every: 1, keep: 1, background: false}
"""


def test_a_link_that_cannot_be_made_is_a_warning_of_the_training_which_ends_ok(tmp_path: Path) -> None:
    """The warning of the last checkpoint, after which no row is written, is in the log of the rank."""
    config, out = tmp_path / "train.yaml", tmp_path / "out"
    config.write_text(TRAINING)
    (out / "checkpoints/.latest/file").mkdir(parents=True)  # in the place of the link that is made first
    done = run_in_process("train", config, "--out", out)
    assert done.returncode == 0, done.stderr
    warnings = [json.loads(line).get("warning") for line in (out / "metrics.jsonl").read_text().splitlines()]
    link = f"{out / 'checkpoints/latest'}: the link could not be replaced (Is a directory); the newest checkpoint is"
    assert warnings == [None, f"{link} step-00000001", f"{link} step-00000002"]
    assert f"warning: {link} step-00000001" in done.stderr
    assert any(f"warning: {link} step-00000003" in log.read_text() for log in (out / "launch").rglob("*.log"))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [".latest", "step-00000003"]
